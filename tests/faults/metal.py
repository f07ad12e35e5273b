"""Faults in the text of the Metal kernels, run by the emulator."""

from dataclasses import dataclass, field, replace

from emulator import EmulatorBackend
from emulator.kernel import EmulatedKernel
from faults.text import Edit, PlaceError
from mlx_h2o import _kernel_text
from mlx_h2o.operations.gpu.launches import Launch

HEADER = "h2o.h"


def kernel_of(name: str) -> str:
    """The kernel that was launched, without the flags in its name."""
    longest = sorted(_kernel_text.KERNELS, key=len, reverse=True)
    return next(kernel for kernel in longest if name.startswith(f"h2o_{kernel}"))


@dataclass(eq=False)
class SeededBackend(EmulatorBackend):
    """The emulator with an edit in what it runs; the text of each kernel has it in ``edited``.

    The place of the edit is a kernel (of a family the beginning of its name), or a function of
    h2o.h, whose names all begin with h2o_.
    """

    edit: Edit | None = None
    edited: list[str] = field(default_factory=list)

    def _kernel(self, each: Launch) -> EmulatedKernel:
        assert self.edit is not None
        if self.edit.place.startswith("h2o_"):
            self.edited.append(HEADER)
            return super()._kernel(each)
        name = kernel_of(each.kernel.name)
        whole = replace(self.edit, place="")
        if name.startswith(self.edit.place) and whole.matches(each.kernel.source):
            self.edited.append(name)
            source = whole.apply(each.kernel.source)
            each = replace(each, kernel=each.kernel._replace(source=source))
        return super()._kernel(each)


def in_one_kernel(edit: Edit, edited: list[str]) -> None:
    """Raises PlaceError unless one kernel of those that ran had the edit."""
    if len(set(edited)) != 1:
        raise PlaceError(f"{edit}: in {sorted(set(edited))}, expected one kernel")


def seeded(edit: Edit, plain: EmulatorBackend | None = None) -> SeededBackend:
    """A back end that runs what ``plain`` runs, with the edit."""
    plain = plain or EmulatorBackend()
    settings = {name: getattr(plain, name) for name in ("run", "simdgroups", "blocks")}
    change = edit.apply if edit.place.startswith("h2o_") else str
    return SeededBackend(**settings, edit_header=change, edit=edit)
