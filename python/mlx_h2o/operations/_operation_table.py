"""Generated from metal/operations.toml by tools/package_kernels.py; do not edit."""

from typing import Any, NamedTuple


class Argument(NamedTuple):
    """An argument, as metal/operations.toml explains it; ``called`` is its name in ``fast``."""

    name: str
    called: str
    kind: str
    dtype: str = ""
    sizes: tuple[str, ...] = ()
    scales: str = ""
    bits: str = ""
    optional: bool = False
    bounds: tuple[tuple[str, Any], ...] = ()
    values: tuple[Any, ...] = ()

    @property
    def layout(self) -> str:
        return f"[{', '.join(self.sizes)}]"


class Operation(NamedTuple):
    """Arguments in order, and rules: a size, its relation, and another size or a number."""

    arguments: tuple[Argument, ...]
    rules: tuple[tuple[str, str, str | int], ...]


OPERATIONS: dict[str, Operation] = {
    'scaled_dot_product_attention_with_scores': Operation((
        Argument(name='queries', called='q', kind='array', dtype='T', sizes=('B', 'Hq', 'Lq', 'D')),
        Argument(name='keys', called='k', kind='array', dtype='T', sizes=('B', 'Hkv', 'N', 'D')),
        Argument(name='values', called='v', kind='array', dtype='T', sizes=('B', 'Hkv', 'N', 'Dv')),
        Argument(name='scale', called='scale', kind='number'),
        Argument(name='mask', called='mask', kind='mask', dtype='bool|F', sizes=('B', 'Hq', 'Lq', 'N'), optional=True),
        Argument(name='sinks', called='sinks', kind='array', dtype='F', sizes=('Hq',), optional=True),
        Argument(name='row_bias', called='row_bias', kind='array', dtype='float32', sizes=('B', 'Hkv', 'N'), optional=True),
    ), (('Hkv', 'divides', 'Hq'),)),
    'scaled_dot_product_attention_quantized_with_scores': Operation((
        Argument(name='queries', called='q', kind='array', dtype='T', sizes=('B', 'Hq', 'Lq', 'D')),
        Argument(name='keys', called='k_w, k_s, k_b', kind='rows', dtype='T', sizes=('B', 'Hkv', 'N', 'D'), scales='S', bits='bits'),
        Argument(name='values', called='v_w, v_s, v_b', kind='rows', dtype='T', sizes=('B', 'Hkv', 'N', 'Dv'), scales='S', bits='v_bits'),
        Argument(name='scale', called='scale', kind='number'),
        Argument(name='bits', called='bits', kind='one_of', optional=True, values=(2, 3, 4, 5, 6, 8)),
        Argument(name='group_size', called='group_size', kind='one_of', optional=True, values=(32, 64, 128)),
        Argument(name='v_bits', called='v_bits', kind='one_of', optional=True, values=(2, 3, 4, 5, 6, 8)),
        Argument(name='mask', called='mask', kind='mask', dtype='bool|F', sizes=('B', 'Hq', 'Lq', 'N'), optional=True),
        Argument(name='sinks', called='sinks', kind='array', dtype='F', sizes=('Hq',), optional=True),
        Argument(name='row_bias', called='row_bias', kind='array', dtype='float32', sizes=('B', 'Hkv', 'N'), optional=True),
        Argument(name='sparse_v_threshold', called='sparse_v_threshold', kind='number', optional=True, bounds=(('least', 0), ('below', 1))),
    ), (('Hkv', 'divides', 'Hq'),)),
    'attention_and_accumulate': Operation((
        Argument(name='queries', called='q', kind='array', dtype='T', sizes=('B', 'Hq', 'Lq', 'D')),
        Argument(name='keys', called='k', kind='rows', dtype='T', sizes=('B', 'Hkv', 'N', 'D'), scales='S', bits='bits'),
        Argument(name='values', called='v', kind='rows', dtype='T', sizes=('B', 'Hkv', 'N', 'Dv'), scales='S', bits='v_bits'),
        Argument(name='importance', called='importance', kind='array', dtype='float32', sizes=('B', 'Hkv', 'N')),
        Argument(name='scale', called='scale', kind='number'),
        Argument(name='kind', called='kind', kind='one_of', optional=True, values=('ema', 'mass')),
        Argument(name='decay', called='decay', kind='number', optional=True, bounds=(('least', 0), ('below', 1))),
        Argument(name='mask', called='mask', kind='mask', dtype='bool|F', sizes=('B', 'Hq', 'Lq', 'N'), optional=True),
        Argument(name='sinks', called='sinks', kind='array', dtype='F', sizes=('Hq',), optional=True),
        Argument(name='row_bias', called='row_bias', kind='array', dtype='float32', sizes=('B', 'Hkv', 'N'), optional=True),
        Argument(name='bits', called='bits', kind='one_of', optional=True, values=(2, 3, 4, 5, 6, 8)),
        Argument(name='group_size', called='group_size', kind='one_of', optional=True, values=(32, 64, 128)),
        Argument(name='v_bits', called='v_bits', kind='one_of', optional=True, values=(2, 3, 4, 5, 6, 8)),
        Argument(name='sparse_v_threshold', called='sparse_v_threshold', kind='number', optional=True, bounds=(('least', 0), ('below', 1))),
    ), (('Hkv', 'divides', 'Hq'), ('Lq', 'most', 128))),
    'prefill_scores': Operation((
        Argument(name='queries', called='q', kind='array', dtype='T', sizes=('B', 'Hq', 'Lq', 'D')),
        Argument(name='keys', called='k', kind='array', dtype='T', sizes=('B', 'Hkv', 'N', 'D')),
        Argument(name='scale', called='scale', kind='number'),
        Argument(name='mask', called='mask', kind='mask', dtype='bool|F', sizes=('B', 'Hq', 'Lq', 'N'), optional=True),
        Argument(name='sinks', called='sinks', kind='array', dtype='F', sizes=('Hq',), optional=True),
        Argument(name='row_bias', called='row_bias', kind='array', dtype='float32', sizes=('B', 'Hkv', 'N'), optional=True),
        Argument(name='kind', called='kind', kind='one_of', optional=True, values=('ema', 'mass')),
        Argument(name='importance', called='importance', kind='array', dtype='float32', sizes=('B', 'Hkv', 'N'), optional=True),
        Argument(name='decay', called='decay', kind='number', optional=True, bounds=(('least', 0), ('below', 1))),
        Argument(name='counted_queries', called='queries', kind='integer', optional=True, bounds=(('least', 1),)),
    ), (('Hkv', 'divides', 'Hq'),)),
    'accumulate_scores': Operation((
        Argument(name='importance', called='importance', kind='array', dtype='float32', sizes=('B', 'H', 'N')),
        Argument(name='scores', called='scores', kind='array', dtype='float32', sizes=('B', 'Hq', 'Lq', 'N')),
        Argument(name='decay', called='decay', kind='number', bounds=(('least', 0), ('below', 1))),
    ), (('H', 'divides', 'Hq'), ('Lq', 'most', 128))),
    'keep_indices': Operation((
        Argument(name='scores', called='scores', kind='array', dtype='float32', sizes=('B', 'H', 'N')),
        Argument(name='positions', called='positions', kind='array', dtype='int32', sizes=('B', 'H', 'N')),
        Argument(name='keep', called='keep', kind='integer', bounds=(('least', 1), ('most', 'N'))),
        Argument(name='sink_size', called='sink_size', kind='integer', optional=True, bounds=(('least', 0),)),
        Argument(name='recent_start', called='recent_start', kind='per_sequence', dtype='int32', optional=True),
    ), ()),
    'key_diversity': Operation((
        Argument(name='keys', called='keys', kind='array', dtype='T', sizes=('B', 'H', 'N', 'D')),
    ), ()),
    'quantize_append': Operation((
        Argument(name='new_keys', called='new_keys', kind='array', dtype='T', sizes=('B', 'H', 'L', 'D')),
        Argument(name='new_values', called='new_values', kind='array', dtype='U', sizes=('B', 'H', 'L', 'Dv')),
        Argument(name='keys', called='quantised_keys', kind='rows', dtype='T', sizes=('B', 'H', 'N', 'D'), scales='T', bits='bits'),
        Argument(name='values', called='quantised_values', kind='rows', dtype='U', sizes=('B', 'H', 'N', 'Dv'), scales='U', bits='v_bits'),
        Argument(name='slots', called='slots', kind='array', dtype='uint32', sizes=('B', 'H', 'L')),
        Argument(name='bits', called='bits', kind='one_of', optional=True, values=(2, 3, 4, 5, 6, 8)),
        Argument(name='group_size', called='group_size', kind='one_of', optional=True, values=(32, 64, 128)),
        Argument(name='v_bits', called='v_bits', kind='one_of', optional=True, values=(2, 3, 4, 5, 6, 8)),
    ), ()),
    'fold': Operation((
        Argument(name='keys', called='keys', kind='array', dtype='T', sizes=('B', 'H', 'N', 'D')),
        Argument(name='values', called='values', kind='array', dtype='T', sizes=('B', 'H', 'N', 'Dv')),
        Argument(name='bias', called='bias', kind='array', dtype='float32', sizes=('B', 'H', 'N')),
        Argument(name='mass', called='mass', kind='array', dtype='float32', sizes=('B', 'H', 'N')),
        Argument(name='weights', called='weights', kind='array', dtype='float32', sizes=('B', 'H', 'N')),
        Argument(name='eligible', called='eligible', kind='array', dtype='bool', sizes=('B', 'H', 'N')),
        Argument(name='kept', called='kept', kind='array', dtype='uint32', sizes=('B', 'H', 'K')),
        Argument(name='share', called='share', kind='number', optional=True, bounds=(('above', 0), ('most', 1))),
    ), (('K', 'below', 'N'),)),
    'encode_rows': Operation((
        Argument(name='rows', called='rows', kind='array', dtype='T', sizes=('B', 'H', 'N', 'D')),
        Argument(name='bits', called='bits', kind='one_of', values=(2, 3, 4)),
    ), ()),
    'decode_rows': Operation((
        Argument(name='rows', called='rows', kind='rows', dtype='T', sizes=('B', 'H', 'N', 'D'), scales='S', bits='bits'),
        Argument(name='bits', called='bits', kind='one_of', values=(2, 3, 4)),
    ), ()),
}
