#!/usr/bin/env bash
# Measurements that need two GPUs of one host, side by side where they do not disturb each other.
#   bench/two_gpus.sh PART... RESULTS     parts: tune modes models v3 hammer served long
#                                                split handoff prefill repeated
# Results, logs' ends included, are kept up to date in RESULTS/two_gpus.tgz while it runs.
set -u
results=${*: -1}
parts=("${@:1:$#-1}")
work=${SPLITWAVE_BENCH_WORK:-$HOME/.cache/splitwave/two_gpus}
mkdir -p "$work/out" "$results"
model=${MODEL:-qwen3_30b_24l}
python=${PYTHON:-python3}

keep() {
  for log in "$work"/rows/*/rows/*/rank*.log "$work"/prefill/rows/*/rank*.log \
    "$work"/{split,repeated}/logs/*.log "$work"/handoff/{,*/,*/control/}*.log "$work"/*.log; do
    [ -f "$log" ] || continue
    name=$(echo "${log#"$work"/}" | tr / _)
    { head -c 20000 "$log"; echo; echo ...; tail -c 60000 "$log"; } >"$work/out/$name.txt"
  done
  # Of one's own: in the end two of these run at once.
  local part=$results/.partial.$BASHPID
  tar -C "$work/out" -czf "$part" . && mv "$part" "$results/two_gpus.tgz"
}
(while sleep 15; do keep; done) >/dev/null 2>&1 &
keeper=$!
trap 'kill $keeper; wait $keeper 2>/dev/null; keep; rm -f "$results"/.partial.*' EXIT
said() { echo "[$SECONDS s] $*"; }

row() { # row NAME MODE [OPTION...]: the command of one row of bench.decode_modes, one word a line
  local name=$1 mode=$2
  shift 2
  printf '%s\n' -- "$python" -m bench.decode_modes --out "$work/out/$name.json" --models "$model" \
    --modes "$mode" --capture-sizes "${SIZES:-64,128,192,256}" --timed "${TIMED:-100}" \
    --batches "${BATCHES:-64,128,256}" --ragged-s "${RAGGED_S:-10}" --row-limit-s "${ROW_S:-330}" \
    --work-dir "$work/rows/$name" --override "$mode:gpu_memory_utilization=0.15" "$@"
}

tuned() { # tuned MODE: with what `tune` has found here, or else what pools are served with
  local found=$work/out/tuned
  [ -d "$found" ] || found=$PWD/splitwave/engine/vllm/moe_configs
  echo "$1:env:VLLM_TUNED_CONFIG_FOLDER=${TUNED:-$found}"
}

alone() { # alone SLOT NAME MODE [OPTION...]: start a row that waits for nobody, in the background
  local slot=$1 name=$2
  shift 2
  mapfile -t words < <(row "$name" "$@")
  SPLITWAVE_BENCH_SLOT=$slot "${words[@]:1}" >"$work/$name.log" 2>&1 &
  waited+=($!)
}

hammered() { # hammered NAME REPLAYS SECONDS OPTION...: one run of the hammer
  local name=$1 replays=$2 seconds=$3
  shift 3
  # Over what it allows itself, kills and the look at stacks included: only then is --out written.
  timeout -k 10 $((seconds + 170)) "$python" -m bench.hammer --replays "$replays" --seconds "$seconds" \
    --setup-s 110 --out "$work/out/hammer_$name.json" "$@" >"$work/hammer_$name.log" 2>&1
  said "hammer $name: $? $(grep -E '"(verdict|why|replays)"' "$work/out/hammer_$name.json" |
    head -3 | tr -d '\n')"
}

by_turns() { # by_turns SECONDS WORD...: boot together, measure one by one
  local boot=$1
  shift
  "$python" -m bench.decode_modes.turn --folder "$work/turn" --boot-s "$boot" "$@" 2>&1
}

# Engines are started by vLLM's entry points, which a copy of the tree that is not installed lacks.
if ! "$python" -c 'import importlib.metadata as m; m.distribution("splitwave")' 2>/dev/null; then
  "$python" -c '
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
folder = pathlib.Path(sys.argv[1]) / "splitwave-0.dist-info"
folder.mkdir(parents=True, exist_ok=True)
(folder / "METADATA").write_text("Metadata-Version: 2.1\nName: splitwave\nVersion: 0\n")
groups = [
    "[" + group + "]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())
    for group, points in project["entry-points"].items()
]
(folder / "entry_points.txt").write_text("\n".join(groups))
' "$work/installed"
  export PYTHONPATH=$work/installed:$PWD${PYTHONPATH:+:$PYTHONPATH}
fi

whole() { # whole NAME SECONDS WORD...: one script with its time limit, its end told
  local name=$1 seconds=$2
  shift 2
  timeout -k 10 "$seconds" "$python" "$@" >"$work/$name.log" 2>&1
  said "$name: $? $(tail -n 4 "$work/$name.log" | tr '\n' ' ' | head -c 600)"
}

run() ( # run PART: in a shell of its own, so that no part's choices reach the next one
  waited=()
  case $1 in
    tune)
      timeout 120 "$python" -m bench.tune_moe --experts 128 --ranks 2 --hidden 2048 \
        --intermediate 768 --topk 8 --rows 128,256,384,512 --out "$work/out/tuned" \
        --report "$work/out/tune.json" --gpus 2 --jobs 26 >"$work/tune.log" 2>&1
      tail -n 8 "$work/tune.log"
      ;;
    modes) # the same model in each mode
      RAGGED_S=3
      mapfile -t words < <(
        row v2 graph_v2 --override "$(tuned graph_v2)"
        row stock stock_v2
        row compiled graph_v2_compiled --override "$(tuned graph_v2_compiled)"
        row legacy graph_legacy --override "$(tuned graph_legacy)"
        row ag graph_ag
      )
      by_turns 170 "${words[@]}"
      ;;
    models) # other models beside eager, and where a step's time goes
      RAGGED_S=0
      mapfile -t words < <(
        model=small
        row small_eager eager_ht
        row small_v2 graph_v2
        model=deepseek_v2_lite
        row lite_eager eager_ht
        row lite_v2 graph_v2
        row lite_stock stock_v2
        model=qwen3_30b_24l BATCHES=64
        row profile_v2 graph_v2 --override "$(tuned graph_v2)" --profile
        row profile_stock stock_v2 --profile
        row unmarked graph_v2 --override "$(tuned graph_v2)" \
          --override graph_v2:env:SPLITWAVE_COLLECTIVE_MARKS=0
      )
      by_turns 150 "${words[@]}"
      ;;
    v3) # DeepSeek-V3's expert layers
      RAGGED_S=0 model=deepseek_v3_4l
      mapfile -t words < <(
        row v3_eager eager_ht
        row v3_v2 graph_v2
      )
      by_turns 150 "${words[@]}"
      ;;
    hammer)
      for transport in v2 legacy legacy_shared legacy_unfixed; do
        hammered "$transport" 12000 35 --transport "$transport"
      done
      ;;
    served) # the hammer on what engines are served with: transports, one buffer for two
      # microbatches, vLLM's whole layer
      hammered v2_served 12000 35 --transport v2 --product
      hammered legacy_served 12000 60 --transport legacy --product
      hammered v2_tbo_served 10000 60 --transport v2 --tbo --tbo-buffers 1
      hammered v2_layer 4000 40 --transport v2 --level layer
      hammered legacy_layer 4000 40 --transport legacy --level layer
      ;;
    long) # what must hold while everything else disturbs it: tokens, poison, a stopped rank
      # What the row v2 has compiled, if it has run here: rows that compile must not share folders.
      if [ -d "$work/rows/v2/caches" ]; then
        export EP_JIT_CACHE_DIR=$work/rows/v2/caches/deep_ep
        export TRITON_CACHE_DIR=$work/rows/v2/caches/triton
      fi
      BATCHES=64 RAGGED_S=300 ROW_S=520
      alone 1 long_v2 graph_v2 --override "$(tuned graph_v2)"
      alone 2 long_legacy graph_legacy --override "$(tuned graph_legacy)"
      alone 3 long_eager eager_ht
      RAGGED_S=30 BATCHES=64,128,256
      alone 4 tbo graph_tbo_v2 --override "$(tuned graph_tbo_v2)"
      model=small RAGGED_S=4 BATCHES=64 ROW_S=300
      alone 5 poison graph_v2 --override graph_v2:env:SPLITWAVE_FAULTS=poison_padding
      alone 6 unsanitised graph_v2 \
        --override graph_v2:env:SPLITWAVE_FAULTS=poison_padding,no_sanitise
      alone 7 poison_legacy graph_legacy --override graph_legacy:env:SPLITWAVE_FAULTS=poison_padding
      alone 8 wedge graph_v2 --wedge
      hammered v2_50000 50000 330 --transport v2
      for seed in 1 2 3; do
        hammered "legacy_unfixed_$seed" 20000 60 --transport legacy_unfixed --seed "$seed"
      done
      hammered v2_tbo 10000 60 --transport v2 --tbo
      hammered legacy_50000 50000 200 --transport legacy
      wait "${waited[@]}"
      for name in long_v2 long_legacy long_eager tbo poison unsanitised poison_legacy wedge; do
        said "$name: $(tail -n 1 "$work/$name.log")"
      done
      ;;
    split) # prefill and decode groups of two ranks on the same two GPUs: right, not fast
      # Without microbatches first: those have hung where one GPU was shared.
      whole split_whole "${SPLIT_S:-300}" -m bench.split_gpu_check --device cuda \
        --prefill-mode prefill_eager_ht --work-dir "$work/split" \
        --out "$work/out/split_gpu_check_whole.json"
      whole split "${SPLIT_S:-240}" -m bench.split_gpu_check --device cuda \
        --work-dir "$work/split" --out "$work/out/split_gpu_check.json"
      ;;
    handoff) # KV from one GPU's cache into the other's, alone
      whole handoff "${HANDOFF_S:-560}" -m bench.handoff --device cuda --limit-s 150 \
        --work-dir "$work/handoff" --out "$work/out/handoff_gpu.json"
      ;;
    prefill) # eager prefill with and without two microbatches
      mapfile -t words < <(
        for name in whole dbo_sms8 dbo_sms12 dbo_sms16 dbo_sms20; do
          printf '%s\n' -- "$python" -m bench.prefill_modes --models "$model" --only "$name" \
            --memory-share 0.15 --row-limit-s "${ROW_S:-430}" --work-dir "$work/prefill" \
            --out "$work/out/prefill_$name.json"
        done
      )
      by_turns 150 "${words[@]}"
      whole prefill_merged 60 -m bench.prefill_modes.merge --work-dir "$work/prefill" \
        --out "$work/out/prefill_modes.json" "$work"/out/prefill_{whole,dbo_sms{8,12,16,20}}.json
      ;;
    repeated) # the twentieth long prompt beside the second, through the whole system
      whole repeated "${REPEATED_S:-420}" -m bench.repeated --device cuda \
        --work-dir "$work/repeated" --out "$work/out/repeated_gpu.json"
      ;;
    *)
      said "no such part"
      ;;
  esac
)

for part in "${parts[@]}"; do
  said "$part"
  run "$part"
  keep
done
