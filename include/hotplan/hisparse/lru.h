/// \file lru.h
/// \brief The stable partition that is a new LRU: where each position of the old order goes.
#pragma once

#include <hotplan/platform.h>

namespace hotplan::hisparse {

/// Unused victims keep their order and become the oldest; then the loaded slots, in miss order; then the hits.
struct Partition {
  uint32_t slots;  // H
  uint32_t hits;   // slots that were hit
  uint32_t loads;  // misses that got a slot: the first `loads` victims

  HOTPLAN_HD uint32_t of_hit(uint32_t hits_before) const {
    return slots - hits + hits_before;
  }
  /// The v-th oldest slot that was not hit; v < loads: it takes the v-th miss.
  HOTPLAN_HD uint32_t of_victim(uint32_t v) const {
    return v < loads ? slots - hits - loads + v : v - loads;
  }
};

}  // namespace hotplan::hisparse
