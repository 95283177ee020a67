/// \file plan.h
/// \brief The packed row of a swap plan: one row to copy from the host pool.
#pragma once

#include <hotplan/platform.h>

namespace hotplan::hisparse {

struct alignas(16) SwapRow {
  int64_t host_row;
  int32_t hot_row;  // -1: the slot has no usable page, nothing is copied
  uint32_t column;  // first top-k column that asked for it; in a union (row - first row) * K + column

  HOTPLAN_HD static SwapRow invalid() {
    return {-1, -1, 0xFFFFFFFFu};
  }
};

static_assert(sizeof(SwapRow) == 16);

/// Slots of a request are int16 in the LRU.
inline constexpr int64_t kMaxHotSlots = 32768;

}  // namespace hotplan::hisparse
