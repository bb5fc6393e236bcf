"""The options of `draftsmith merge`; reading them needs no torch."""

from dataclasses import dataclass

from draftsmith_core.errors import InputError
from draftsmith_core.option_types import check_types

# Beyond this a merged draft is noise, and fp32 could overflow.
_LARGEST = 100


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Add up the weights of drafts of one shape: base + sum of weight x (draft - base).

    One draft with a base is an interpolation between the two (WiSE-FT, arXiv 2109.01903), several without a base and
    without weights are a uniform soup (arXiv 2203.05482), several with a base are task vectors (arXiv 2212.04089).
    """

    out: str
    """The merged draft: an ordinary checkpoint directory."""
    draft: list[str]
    """The drafts, each MODEL or MODEL=WEIGHT. Without weights all count alike; these then add up to 1."""
    base: str | None = None
    """The draft that the others were trained from. Without it the weights must add up to 1."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""

    def __post_init__(self) -> None:
        check_types(self)
        self.weights()  # refuses what they cannot be

    def weights(self) -> list[tuple[str, float]]:
        """(model, weight) of every draft. InputError where weights are missing, not finite or do not add up."""
        found = [_source_and_weight(each) for each in self.draft]
        if not found:
            raise InputError("--draft: is empty; name at least one draft")
        given = [weight for _, weight in found if weight is not None]
        if given and len(given) < len(found):
            without = next(source for source, weight in found if weight is None)
            raise InputError(
                f"--draft {without}: has no weight and others have; write {without}=WEIGHT, or none at all"
            )
        if not given and self.base is not None and len(found) == 1:
            path, colon, weight = found[0][0].rpartition(":")
            such = f"{path}={weight}" if colon and weight.replace(".", "", 1).isdigit() else f"{found[0][0]}=0.5"
            raise InputError(f"--draft {found[0][0]}: say how far to go from the base to it, such as {such}")
        if self.base is None:
            if len(found) == 1:
                raise InputError("--draft: one draft and no base is a copy; name a second draft, or the base")
            if given and abs(sum(given) - 1) > 1e-6:
                raise InputError(
                    f"--draft: the weights add up to {sum(given):g}; without a base they must add up to 1 (name --base)"
                )
        named = [source for source, _ in found]
        if self.base is not None:
            named.append(self.base)
        if twice := next((source for source in named if named.count(source) > 1), None):
            raise InputError(f"--draft {twice}: is named twice (as a draft, or as draft and base); name it once")
        return [(source, 1 / len(found) if weight is None else weight) for source, weight in found]

    def sources(self) -> list[str]:
        """The drafts, and after them the base, where there is one."""
        return [source for source, _ in self.weights()] + ([] if self.base is None else [self.base])


def _source_and_weight(word: str) -> tuple[str, float | None]:
    source, equals, text = word.rpartition("=")
    if not equals:
        return word, None
    try:
        weight = float(text)
    except ValueError:
        return word, None  # the name of the directory holds the sign
    if not source or not abs(weight) <= _LARGEST:
        raise InputError(f"--draft {word}: expected MODEL=WEIGHT with a weight from -{_LARGEST} to {_LARGEST}")
    return source, weight
