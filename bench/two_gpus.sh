#!/usr/bin/env bash
# Measurements that need two GPUs of one host, side by side where they do not disturb each other.
#   bench/two_gpus.sh PART... RESULTS     parts: tune modes hammer more
# Results, logs' ends included, are kept up to date in RESULTS/two_gpus.tgz while it runs.
set -u
results=${*: -1}
parts=("${@:1:$#-1}")
work=${SPLITWAVE_BENCH_WORK:-/tmp/two_gpus}
mkdir -p "$work/out" "$results"
model=${MODEL:-qwen3_30b_24l}
python=${PYTHON:-python3}

keep() {
  for log in "$work"/rows/*/rows/*/rank*.log "$work"/*.log; do
    [ -f "$log" ] || continue
    name=$(echo "${log#"$work"/}" | tr / _)
    { head -c 20000 "$log"; echo; echo ...; tail -c 60000 "$log"; } >"$work/out/$name.txt"
  done
  tar -C "$work/out" -czf "$results/.partial" . && mv "$results/.partial" "$results/two_gpus.tgz"
}
(while sleep 15; do keep; done) &
keeper=$!
trap 'kill $keeper; keep' EXIT
said() { echo "[$SECONDS s] $*"; }

row() { # row NAME MODE [OPTION...]: the command of one row of bench.decode_modes, one word a line
  local name=$1 mode=$2
  shift 2
  printf '%s\n' -- "$python" -m bench.decode_modes --out "$work/out/$name.json" --models "$model" \
    --modes "$mode" --capture-sizes "${SIZES:-64,128,192,256}" --timed "${TIMED:-100}" \
    --batches "${BATCHES:-64,128,256}" --ragged-s "${RAGGED_S:-10}" --row-limit-s "${ROW_S:-330}" \
    --work-dir "$work/rows/$name" --override "$mode:gpu_memory_utilization=0.15" "$@"
}

tuned() { echo "$1:env:VLLM_TUNED_CONFIG_FOLDER=$work/out/tuned"; }

for part in "${parts[@]}"; do
  said "$part"
  case $part in
    tune)
      timeout 120 "$python" -m bench.tune_moe --experts 128 --ranks 2 --hidden 2048 \
        --intermediate 768 --topk 8 --rows 128,256,384,512 --out "$work/out/tuned" \
        --report "$work/out/tune.json" --gpus 2 --jobs 26 >"$work/tune.log" 2>&1
      tail -n 8 "$work/tune.log"
      ;;
    modes)
      mapfile -t words < <(
        row eager eager_ht
        row v2 graph_v2 --override "$(tuned graph_v2)"
        row stock stock_v2
        row legacy graph_legacy --override "$(tuned graph_legacy)"
        row tbo graph_tbo_v2 --override "$(tuned graph_tbo_v2)"
      )
      "$python" -m bench.decode_modes.turn --folder "$work/turn" --boot-s 210 "${words[@]}" 2>&1
      ;;
    hammer)
      for transport in v2 legacy legacy_shared legacy_unfixed; do
        timeout 150 "$python" -m bench.hammer --transport "$transport" --replays "${REPLAYS:-12000}" \
          --seconds "${HAMMER_S:-35}" --setup-s 100 --out "$work/out/hammer_$transport.json" \
          >"$work/hammer_$transport.log" 2>&1
        said "hammer $transport: $? $(grep -E '"(verdict|why|replays)"' "$work/out/hammer_$transport.json" | head -3 | tr -d '\n')"
      done
      ;;
    *)
      said "no such part"
      ;;
  esac
  keep
done
