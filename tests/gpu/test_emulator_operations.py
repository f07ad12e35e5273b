"""Tests of the CPU back ends, repeated on the emulator."""

import pytest

from emulator.marks import EMULATED
from operations import test_native as attention
from operations import test_turbo as codes

pytestmark = [*EMULATED, pytest.mark.slow, pytest.mark.usefixtures("backend")]


@pytest.fixture
def backend(emulator: None) -> str:
    return "emulator"


test_bias = attention.test_a_row_bias_is_read_through_its_strides
test_hidden = attention.test_keys_hidden_by_causality_may_hold_anything
test_large_logits = attention.test_large_logits_neither_overflow_nor_lose_the_maximum
test_lowest = attention.test_half_of_the_lowest_value_masks_and_the_next_greater_does_not
test_masked = attention.test_masked_rows_may_hold_anything
test_masks = attention.test_masks_broadcast
test_sliced_mask = attention.test_a_mask_made_by_a_slice_is_read_through_its_strides
test_views = attention.test_views_with_any_strides

test_codes = codes.test_rows_are_packed_as_the_format_says
test_codes_in_slots = codes.test_new_rows_go_to_their_slots_in_memory_of_their_own
test_codes_of_zeros = codes.test_a_row_of_zeros_stays_one
