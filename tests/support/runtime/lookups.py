"""Random batches over random arenas, and the lookup's definition in NumPy."""

from dataclasses import dataclass

import numpy as np
import torch

from oper.plan.layout import LOCAL, SLOT_BITS
from oper.runtime.tables.kernel_structs import DTYPE_CODE, FEATURE, as_words

TORCH_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Case:
    """Arenas of W widths on M ranks, and a batch of features that read them from `rank`."""

    rank: int
    arenas: list[list[torch.Tensor]]  # [W][M + 1], uint8 [slots, row_bytes]
    values: list[list[np.ndarray]]  # the same rows, float32 [slots, dim]
    described: np.ndarray  # FEATURE [F]
    addresses: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    out_elements: int

    @property
    def bases(self) -> torch.Tensor:
        return torch.tensor([[a.data_ptr() for a in of_width] for of_width in self.arenas])

    @property
    def features(self) -> torch.Tensor:
        return as_words(self.described)

    def arguments(self) -> tuple:
        return (self.addresses, self.offsets, self.weights, self.features, self.bases, self.rank)

    def bags(self):
        """Feature, place in the output, and accesses of each bag."""
        for feature in self.described:
            for i in range(feature["bags"]):
                bag = int(feature["first_bag"] + i)
                span = (bag, bag + 1)
                if self.offsets is not None:
                    span = tuple(self.offsets[bag : bag + 2].tolist())
                yield feature, int(feature["out_base"] + i * feature["out_stride"]), range(*span)

    def row(self, feature, n: int) -> np.ndarray:
        field, slot = divmod(int(self.addresses[n]), 1 << SLOT_BITS)
        arena = self.values[feature["width"]][self.rank if field == LOCAL else field]
        return arena[slot]

    def expected(self) -> np.ndarray:
        """The output: sums in float32, access by access."""
        out = np.zeros(self.out_elements, dtype=np.float32)
        for feature, at, accesses in self.bags():
            total = np.zeros(feature["dim"], dtype=np.float32)
            for n in accesses:
                weight = np.float32(1 if self.weights is None else self.weights[n])
                total += weight * self.row(feature, n)
            if feature["mean"] and len(accesses):
                total /= np.float32(len(accesses))
            out[at : at + feature["dim"]] = total
        return out


def stored(values: torch.Tensor, dtype: str, row_bytes: int) -> torch.Tensor:
    """Rows [slots, dim] as an arena keeps them, uint8 [slots, row_bytes]."""
    if dtype == "int8":
        packed = torch.ops.quantized.embedding_bag_byte_prepack(values)
    else:
        packed = values.to(TORCH_DTYPE[dtype]).contiguous().view(torch.uint8)
    arena = torch.full((len(values), row_bytes), 255, dtype=torch.uint8)
    arena[:, : packed.shape[1]] = packed.reshape(len(values), -1)
    return arena


def loaded(arena: torch.Tensor, dtype: str, dim: int) -> np.ndarray:
    """The values of an arena's rows, float32 [slots, dim]."""
    if dtype == "int8":
        packed = arena[:, : dim + 8].contiguous()
        scale_bias = packed[:, dim:].contiguous().view(torch.float32).numpy()
        return packed[:, :dim].numpy() * scale_bias[:, :1] + scale_bias[:, 1:]
    size = torch.empty((), dtype=TORCH_DTYPE[dtype]).element_size()
    return arena[:, : dim * size].contiguous().view(TORCH_DTYPE[dtype]).float().numpy()


def random_case(
    rng: np.random.Generator,
    dims: list[int],
    dtypes: list[str],
    *,
    ranks: int = 2,
    features: int = 3,
    bags: list[int] | None = None,
    longest: int | None = 5,
    index: torch.dtype = torch.int64,
    weighted: bool = False,
    means: bool = False,
    blocks: bool = False,
    slots: int = 17,
) -> Case:
    """One width for each of `dims` and `dtypes`; features read them in turn.

    `bags` of each feature (one number of them: all in rows of one output; else, or with `blocks`,
    features lie one after the other); bags of 0 to `longest` accesses, or None for one access each
    without offsets.
    """
    rank = int(rng.integers(ranks))
    widths = list(zip(dims, dtypes, strict=True))
    arenas, values = [], []
    for dim, dtype in widths:
        least = {"fp32": 4 * dim, "fp16": 2 * dim, "bf16": 2 * dim, "int8": dim + 8}[dtype]
        row_bytes = -(-least // 16) * 16
        drawn = [torch.from_numpy(rng.normal(size=(slots, dim))).float() for _ in range(ranks + 1)]
        arenas.append([stored(d, dtype, row_bytes) for d in drawn])
        values.append([loaded(a, dtype, dim) for a in arenas[-1]])

    bags = bags or [int(rng.integers(0, 7))] * features
    described = np.zeros(len(bags), dtype=FEATURE)
    of_width = np.arange(len(bags)) % len(widths)
    described["width"] = of_width
    described["dim"] = np.array(dims)[of_width]
    described["dtype"] = [DTYPE_CODE[widths[w][1]] for w in of_width]
    described["row_bytes"] = [arenas[w][0].shape[1] for w in of_width]
    described["bags"] = bags
    described["first_bag"] = np.cumsum(bags) - bags
    described["mean"] = rng.integers(0, 2, len(bags)) if means else 0
    described["has_gradient"] = 1
    width = described["dim"]
    if blocks or len(set(bags)) > 1:
        described["out_base"] = np.cumsum(bags * width) - bags * width
        described["out_stride"] = width
    else:
        described["out_base"] = np.cumsum(width) - width
        described["out_stride"] = width.sum()

    lengths = np.ones(sum(bags), np.int64)
    if longest is not None:
        lengths = rng.integers(0, longest + 1, sum(bags))
    n = int(lengths.sum())
    field = rng.choice([LOCAL, *range(ranks + 1)], n)
    addresses = torch.from_numpy(field.astype(np.int64) << SLOT_BITS | rng.integers(0, slots, n))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).to(index)
    return Case(
        rank,
        arenas,
        values,
        described,
        addresses,
        offsets if longest is not None else None,
        torch.from_numpy(rng.normal(size=n)).float() if weighted else None,
        int((described["bags"] * width).sum()),
    )
