"""Fingerprints differ by name, whatever the kind of the difference; and what does not count."""

import os

import pytest

from splitwave.core.fingerprint import Fingerprint, ranks_differ, without_neutral
from splitwave.core.neutral import ENV_PREFIXES, NEUTRAL, counts, is_neutral, variables
from tests.unit.certificates import VALUES


def names(one: Fingerprint, other: Fingerprint) -> list[str]:
    return [difference.name for difference in one.differences(other)]


def test_equal_tables_have_no_difference() -> None:
    one, other = Fingerprint(VALUES), Fingerprint(dict(reversed(VALUES.items())))

    assert names(one, other) == []
    assert one.digest == other.digest


@pytest.mark.parametrize("name", VALUES)
def test_each_name_counts_changed_missing_and_new(name: str) -> None:
    whole = Fingerprint(VALUES)
    less = Fingerprint({key: value for key, value in VALUES.items() if key != name})

    assert names(whole, Fingerprint(VALUES | {name: "other"})) == [name]
    assert names(whole, less) == [name]
    assert names(less, whole) == [name]
    assert str(whole.differences(less)[0]).endswith("found not there")
    assert "certified not there" in str(less.differences(whole)[0])
    assert whole.digest != less.digest


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0, False), (None, "None"), ("1", 1), (0, None)]
)
def test_values_of_different_kinds_differ(
    one: str | int | float | bool | None, other: str | int | float | bool | None
) -> None:
    first, second = Fingerprint({"vllm.x": one}), Fingerprint({"vllm.x": other})

    assert names(first, second) == ["vllm.x"]
    assert first.digest != second.digest


def test_causes_are_told_before_effects() -> None:
    found = Fingerprint(
        {"weights.a": "1", "vllm.b": "1", "env.c": "1", "version.d": "1", "hardware.e": "1"}
    )

    assert names(Fingerprint({}), found) == [
        "version.d", "hardware.e", "env.c", "vllm.b", "weights.a",
    ]  # fmt: skip


def test_a_name_of_no_section_is_refused() -> None:
    with pytest.raises(ValueError, match=r"odd\.x is in none of version, hardware"):
        Fingerprint({"odd.x": 1})


def test_the_first_rank_that_runs_otherwise_is_found() -> None:
    same = {"env.A": "1"}

    assert ranks_differ([same, dict(same), dict(same)]) is None
    differ = ranks_differ([same, same, {"env.A": "2"}, {"env.A": "3"}])
    assert differ is not None
    rank, difference = differ
    assert (rank, difference.name, difference.certified, difference.found) == (2, "env.A", "1", "2")


@pytest.mark.parametrize(
    "variable",
    [
        "NCCL_NEVER_HEARD_OF", "VLLM_NEW_SWITCH", "CUDA_LAUNCH_BLOCKING", "LD_PRELOAD",
        "OMP_NUM_THREADS", "TORCHINDUCTOR_MAX_AUTOTUNE", "SPLITWAVE_FAULTS", "UCX_TLS",
        "GLIBC_TUNABLES", "VLLM_USE_V2_MODEL_RUNNER", "EP_DISABLE_GIN", "DG_X", "NIXL_X",
        "NVSHMEM_X", "TRITON_X", "PYTORCH_CUDA_ALLOC_CONF", "NVIDIA_TF32_OVERRIDE",
        "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA",
        "ATEN_CPU_CAPABILITY", "LD_LIBRARY_PATH", "LD_AUDIT", "FLA_TRIL_PRECISION",
        "CUTEDSL_ENABLE_AUTOTUNING", "ENABLE_PERSISTENT_TMA_MATMUL", "FORCE_NUM_KV_SPLITS",
    ],
)  # fmt: skip
def test_a_variable_with_a_prefix_that_matters_counts_known_or_not(variable: str) -> None:
    assert counts(variable)


@pytest.mark.parametrize(
    "variable",
    [
        "HOME",
        "PATH",
        "VLLM_HOST_IP",
        "SPLITWAVE_DECODE_LISTEN",
        "VLLM_API_KEY",
        "HF_TOKEN",
        "NVIDIA_VISIBLE_DEVICES",
        "ONEDNN_VERBOSE",
        "ONEDNN_VERBOSE_TIMESTAMP",
    ],
)
def test_paths_addresses_and_secrets_do_not(variable: str) -> None:
    assert not counts(variable)


def test_a_neutral_name_is_no_prefix_of_others_unless_it_says_so() -> None:
    assert is_neutral("vllm.instance_id")
    assert not is_neutral("vllm.instance_ids")
    assert not is_neutral("vllm.logging_configuration")
    assert is_neutral("vllm.logging_config.log_level")


def test_every_neutral_name_has_a_section_and_a_reason() -> None:
    assert all(name.startswith(("env.", "sim.", "vllm.")) for name in NEUTRAL)
    assert all(" " in reason for reason in NEUTRAL.values())
    listed = [name.removeprefix("env.") for name in NEUTRAL if name.startswith("env.")]
    assert all(name.startswith(ENV_PREFIXES) for name in listed)


def test_neutral_values_are_left_out() -> None:
    assert without_neutral({"env.VLLM_HOST_IP": "x", "env.NCCL_X": "1"}) == {"env.NCCL_X": "1"}


def test_a_variable_that_is_no_text_counts_all_the_same() -> None:
    odd = os.fsdecode(b"caf\xe9")

    found = variables({"NCCL_ODD": odd, "HOME": odd})

    assert found == {"env.NCCL_ODD": "caf\\xe9"}
    assert len(Fingerprint(dict(found)).digest) == 64
