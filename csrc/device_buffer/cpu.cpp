/// \file cpu.cpp
/// \brief The CPU backend: one row of requests after the other, by the rules that the kernels use.
#include <hotplan/device_buffer/rules.h>
#include <hotplan/hisparse/set.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "launch.h"

namespace hotplan::device_buffer {

namespace {

using hisparse::kNone;

void copy_paged(char* to, int64_t dst, const char* from, int64_t src) {
  std::memcpy(to + paged_offset(dst, 0), from + paged_offset(src, 0), kValueBytes);
  std::memcpy(to + paged_offset(dst, kValueBytes), from + paged_offset(src, kValueBytes), kScaleBytes);
}

void copy_item(const Items& items, int64_t src, int64_t dst) {
  for (int i = 0; i < 2 && items.host[i] != nullptr; ++i) {
    if (items.paged) {
      copy_paged(items.device[i], dst, items.host[i], src);
    } else {
      std::memcpy(items.device[i] + dst * items.item_bytes, items.host[i] + src * items.item_bytes, items.item_bytes);
    }
  }
}

/// The state of one request.
struct State {
  int32_t index;
  int32_t* tokens;
  const int32_t* locs;
};

class Resolver {
 public:
  explicit Resolver(const SwapInParams& p)
      : p_(p), set_(p.slots), found_(p.steps * p.columns.divisor), index_(found_.size()) {}

  void resolve(uint32_t row) {
    if (is_padding(p_.num_real, row)) {
      write_nothing(row, p_.padded, /*count=*/p_.steps > 1);
      return;
    }
    const int32_t index = state_of(p_, row);
    if (index < 0) {
      write_nothing(row, -1, /*count=*/true);
      return;
    }
    const int64_t at = index * p_.buffer_stride;
    const State state{index, p_.tokens + at, p_.locs + at};
    collect(state, row);
    uint32_t misses = 0;
    if (set_.size() > 0) misses = p_.steps == 1 ? swap<int16_t>(state, row) : swap<int32_t>(state, row);
    if (p_.miss_count != nullptr) p_.miss_count[row] = static_cast<int32_t>(misses);
    if (p_.state_misses != nullptr) p_.state_misses[index] = static_cast<int32_t>(misses);
    write(row);
  }

 private:
  /// What columns ask for: a row that is found here, a token that the LRU decides about, or nothing.
  void collect(const State& state, uint32_t row) {
    const uint32_t columns = p_.columns.divisor;
    set_.begin(found_.size());
    for (uint32_t step = 0; step < p_.steps; ++step) {
      const int64_t length = p_.lengths.at(static_cast<int64_t>(row) * p_.steps + step);
      const int32_t* entries = p_.top_k + row * p_.top_k_stride[0] + step * p_.top_k_stride[1];
      for (uint32_t column = 0; column < columns; ++column) {
        const uint32_t q = step * columns + column;
        const int32_t token = token_at(p_, entries, column);
        index_[q] = kNone;
        found_[q] = -1;
        if (is_short(p_, length)) {
          const int32_t slot = short_slot(p_, length, column, token);
          if (slot >= 0) found_[q] = device_row(p_.items, state.locs[slot]);
          continue;
        }
        if (may_be_extra(p_, length, token)) {
          found_[q] = extra_row(p_, state.tokens + p_.slots, state.locs + p_.slots, token);
          if (p_.steps == 1 || found_[q] >= 0) continue;
        }
        if (exists(p_, length, token)) index_[q] = set_.want(token, q);
      }
    }
  }

  /// Finds hits, loads misses and renews the LRU. Returns the number of misses.
  template <typename Slot>
  uint32_t swap(const State& state, uint32_t row) {
    Slot* lru = static_cast<Slot*>(p_.lru) + state.index * p_.lru_stride;
    set_.find_hits(lru, state.tokens);
    std::vector<uint32_t>& missing = set_.missing();
    const auto absent = [&](uint32_t index) { return host_row(p_, state.index, set_[index].id) < 0; };
    missing.erase(std::remove_if(missing.begin(), missing.end(), absent), missing.end());
    const uint32_t loads = set_.replace_victims(lru);
    const uint32_t misses = min_of(static_cast<uint32_t>(missing.size()), loads + p_.scratch_rows);

    rows_.assign(set_.size(), -1);
    for (uint32_t index = 0; index < set_.size(); ++index) {
      if (set_[index].slot != kNone) rows_[index] = device_row(p_.items, state.locs[set_[index].slot]);
    }
    for (uint32_t m = 0; m < misses; ++m) {
      const hisparse::Wanted& wanted = set_[missing[m]];
      int32_t& dst = rows_[missing[m]];
      if (m < loads) {
        state.tokens[wanted.slot] = dst >= 0 ? wanted.id : -1;
      } else {
        dst = device_row(p_.items, p_.scratch[state.index * p_.scratch_stride + (m - loads)]);
      }
      const int64_t src = host_row(p_, state.index, wanted.id);
      if (p_.miss_src != nullptr) {
        p_.miss_src[row * p_.plan_stride + m] = src;
        p_.miss_dst[row * p_.plan_stride + m] = dst;
      }
      // Once more: a row of the host that was one may lie where the LRU or a token has been written.
      if (!p_.skip_io && is_copy(p_.items, src, dst)) copy_item(p_.items, src, dst);
    }
    return misses;
  }

  void write(uint32_t row) const {
    for_columns(row, [&](uint32_t q) { return index_[q] == kNone ? found_[q] : rows_[index_[q]]; });
  }

  void write_nothing(uint32_t row, int32_t value, bool count) const {
    for_columns(row, [&](uint32_t) { return value; });
    if (count && p_.miss_count != nullptr) p_.miss_count[row] = 0;
  }

  template <typename Value>
  void for_columns(uint32_t row, Value&& value) const {
    const uint32_t columns = p_.columns.divisor;
    for (uint32_t step = 0; step < p_.steps; ++step) {
      int32_t* out = p_.out + row * p_.out_stride[0] + step * p_.out_stride[1];
      for (uint32_t column = 0; column < columns; ++column) out[column] = value(step * columns + column);
    }
  }

  const SwapInParams& p_;
  hisparse::SetResolver set_;
  std::vector<int32_t> found_;   // by column: its row, where the LRU has no say
  std::vector<uint32_t> index_;  // by column: its index in set_, or kNone
  std::vector<int32_t> rows_;    // by index in set_
};

}  // namespace

bool device_can_read(const void*, Queue) {
  return true;
}

int64_t workspace_bytes(const SwapInParams&, Queue) {
  return 0;
}

Status run_swap_in(const SwapInParams& p, char*, Queue) {
  Resolver resolver(p);
  for (uint32_t row = 0; row < p.rows; ++row) resolver.resolve(row);
  return 0;
}

Status run_planned_copy(const PlannedCopyParams& p, Queue) {
  for (uint32_t row = 0; row < p.rows && !p.skip_io; ++row) {
    const int64_t* src = p.miss_src + row * p.plan_stride;
    const int32_t* dst = p.miss_dst + row * p.plan_stride;
    for (uint32_t m = 0; m < listed(p, row); ++m) {
      if (is_copy(p.items, src[m], dst[m])) copy_item(p.items, src[m], dst[m]);
    }
  }
  return 0;
}

Status run_transfer(const TransferParams& p, Queue) {
  for (uint32_t layer = 0; layer < p.layers; ++layer) {
    const auto* from = reinterpret_cast<const char*>(p.src_ptrs[layer]);
    auto* to = reinterpret_cast<char*>(p.dst_ptrs[layer]);
    for (uint32_t i = 0; i < p.items.divisor; ++i) {
      if (p.src_indices[i] >= 0 && p.dst_indices[i] >= 0) copy_paged(to, p.dst_indices[i], from, p.src_indices[i]);
    }
  }
  return 0;
}

Status run_translate(const TranslateParams& p, Queue) {
  for (int64_t i = 0; i < p.count; ++i) {
    const int64_t row = translated(p, i);
    if (p.wide_out) {
      static_cast<int64_t*>(p.out)[i] = row;
    } else {
      static_cast<int32_t*>(p.out)[i] = static_cast<int32_t>(row);
    }
  }
  return 0;
}

const char* status_text(Status) {
  return "ok";
}

}  // namespace hotplan::device_buffer
