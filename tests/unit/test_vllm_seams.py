"""The self-test of what is wrapped in vLLM, and the platform that is chosen."""

import pytest

from splitwave.engine.vllm import seams
from splitwave.engine.vllm.plugin import CPU_PLATFORM, platform
from splitwave.engine.vllm.seams import Seam, SeamBroken, check_seams, require_attributes


@pytest.mark.timeout(60)
def test_the_installed_vllm_has_every_seam() -> None:
    check_seams(seams.EVERYWHERE + seams.CPU)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (Seam("vllm.v1.no_such_module:Scheduler", ()), "vllm.v1.no_such_module:Scheduler is gone"),
        (Seam("json:JSONDecoder.no_such_name", ()), "json:JSONDecoder.no_such_name is gone"),
        (Seam("json:JSONDecoder.decode", ("self", "s")), r"takes \('self', 's', '_w'\), not"),
    ],
)
def test_a_changed_seam_is_named_with_the_version_of_vllm(broken: Seam, complaint: str) -> None:
    with pytest.raises(SeamBroken, match=f"(?s)vLLM 0\\.32\\.0.*{complaint}"):
        check_seams((Seam("json:dumps.__call__", ("args", "kwargs")), broken))


def test_all_changed_seams_are_named_at_once() -> None:
    with pytest.raises(SeamBroken, match=r"(?s)first is gone.*second is gone"):
        check_seams((Seam("json:first", ()), Seam("json:second", ())))


def test_an_attribute_that_vllm_no_longer_sets_is_named() -> None:
    class OfVllm:
        kept = 1

    class Ours(OfVllm):
        pass

    require_attributes(Ours(), ("kept",))
    with pytest.raises(SeamBroken, match="OfVllm has no lost"):
        require_attributes(Ours(), ("kept", "lost"))


def test_the_cpu_platform_is_ours_where_vllm_would_choose_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm.platforms

    detected: dict[str, str | None] = {"cpu": "vllm.platforms.cpu.CpuPlatform", "cuda": None}
    plugins = {name: lambda path=path: path for name, path in detected.items()}
    monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", plugins)
    assert platform() == CPU_PLATFORM


@pytest.mark.parametrize(
    "detected",
    [
        {"cpu": None, "cuda": "vllm.platforms.cuda.CudaPlatform"},
        {"cpu": "vllm.platforms.cpu.CpuPlatform", "cuda": "vllm.platforms.cuda.CudaPlatform"},
        {"cpu": "vllm.platforms.zen_cpu.ZenCpuPlatform"},
        {},
    ],
)
def test_any_other_platform_is_left_alone(
    detected: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.platforms

    plugins = {name: lambda path=path: path for name, path in detected.items()}
    monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", plugins)
    assert platform() is None
