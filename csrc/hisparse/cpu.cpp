/// \file cpu.cpp
/// \brief The CPU backend: one run of launch rows after the other, by the rules that the kernels use.
#include <hotplan/hisparse/rules.h>
#include <hotplan/hisparse/set.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "launch.h"

namespace hotplan::hisparse {

namespace {

Run run_at(const ResolveParams& p, uint32_t row) {
  const int32_t request = request_of(p, row);
  Run run{RowKind::kFirst, request, state_of(p, request), 1};
  if (run.state < 0) run.kind = RowKind::kPadding;
  if (run.kind == RowKind::kPadding || p.max_union_rows == 0 || p.request_ids == nullptr) return run;
  uint32_t before = 0;
  while (before < p.max_union_rows && before < row && p.request_ids[row - before - 1] == request) ++before;
  if (before > 0) {
    run.kind = before < p.max_union_rows ? RowKind::kFollower : RowKind::kPadding;
    return run;
  }
  while (run.rows < min_of(p.max_union_rows, p.rows - row) && p.request_ids[row + run.rows] == request) ++run.rows;
  return run;
}

class Resolver {
 public:
  Resolver(const ResolveParams& p, bool copy) : p_(p), copy_(copy), set_(p.hot_slots) {}

  void resolve(uint32_t row) {
    const Run run = run_at(p_, row);
    if (run.kind == RowKind::kPadding) write_padding(row);
    if (run.kind != RowKind::kFirst) return;
    collect(run, row);
    uint32_t loads = 0;
    if (set_.size() > 0) loads = swap(run, row);
    write_columns(run, row);
    write_lists(run, row, loads);
  }

  /// Distinct pending ids of a run.
  uint32_t collect(const Run& run, uint32_t row) {
    const uint32_t top_k = p_.top_k.divisor;
    const auto references = static_cast<std::size_t>(run.rows) * top_k;
    set_.begin(references);
    columns_.resize(references);
    index_.assign(references, kNone);
    pending_ = 0;
    for (uint32_t i = 0; i < run.rows; ++i) {
      const int32_t* tokens = p_.ids + static_cast<int64_t>(row + i) * p_.ids_stride;
      for (uint32_t c = 0; c < top_k; ++c) {
        const uint32_t q = i * top_k + c;
        const Location at = locate(p_, tokens[c], look_up(p_, run.request, tokens[c]));
        columns_[q] = at;
        if (!at.pending()) continue;
        ++pending_;
        index_[q] = set_.want(at.id, q);
      }
    }
    return set_.size();
  }

 private:
  /// Rules 6 to 8: hits, victims, the new order. Returns the number of copies.
  uint32_t swap(const Run& run, uint32_t row) {
    int16_t* lru = p_.lru + static_cast<int64_t>(run.state) * p_.hot_slots;
    int32_t* dgi = p_.dgi + static_cast<int64_t>(run.state) * p_.hot_slots;
    set_.find_hits(lru, dgi);
    const uint32_t loads = set_.replace_victims(lru);
    for (uint32_t m = 0; m < loads; ++m) {
      const Wanted& wanted = set_[set_.missing()[m]];
      const int32_t where = row_of(run, wanted.slot);
      dgi[wanted.slot] = where >= 0 ? wanted.id : -1;
      if (copy_ && where >= 0) {
        std::memcpy(
            p_.caches.hot + hot_offset(p_.caches, static_cast<uint32_t>(where)),
            p_.caches.host + wanted.id * p_.caches.row_bytes, static_cast<std::size_t>(p_.caches.row_bytes));
      }
      if (p_.swap_host != nullptr) {
        const int64_t at = static_cast<int64_t>(row) * p_.top_k.divisor + m;
        p_.swap_host[at] = wanted.id;
        p_.swap_device[at] = where;
      }
    }
    if (p_.stats != nullptr) {
      const std::size_t misses = set_.missing().size();
      p_.stats[0] += pending_ - misses;
      p_.stats[1] += misses;
    }
    return loads;
  }

  int32_t row_of(const Run& run, uint32_t slot) const {
    return hot_row(p_.caches, page_at(p_.tables.hot, run.request, p_.caches.block_size.div(slot)), slot);
  }

  void write_columns(const Run& run, uint32_t row) const {
    const uint32_t top_k = p_.top_k.divisor;
    const int64_t base = static_cast<int64_t>(row) * top_k;
    for (uint32_t i = 0; i < run.rows; ++i) {
      int32_t valid = 0;
      for (uint32_t c = 0; c < top_k; ++c) {
        const uint32_t q = i * top_k + c;
        int32_t where = columns_[q].resident;
        bool loads = false;
        if (index_[q] != kNone) {
          const Wanted& wanted = set_[index_[q]];
          where = wanted.slot == kNone ? -1 : row_of(run, wanted.slot);
          loads = wanted.loaded && wanted.reference == q && where >= 0;
        }
        valid += columns_[q].valid();
        p_.hot[base + q] = where;
        if (p_.resolved) p_.resolved[base + q] = columns_[q].id;
        if (p_.mask) p_.mask[base + q] = loads;
        if (p_.attention) {
          p_.attention[(row + i) * p_.attention_stride + c] =
              attention_index(p_.caches, p_.attention_block_stride, where);
        }
      }
      if (p_.valid) p_.valid[(row + i) * p_.valid_stride] = valid;
    }
  }

  /// Counts, and the packed plan, whose rows past the count are invalid ones.
  void write_lists(const Run& run, uint32_t row, uint32_t loads) {
    const uint32_t top_k = p_.top_k.divisor;
    const int64_t base = static_cast<int64_t>(row) * top_k;
    for (uint32_t i = 0; i < run.rows && p_.swap_counts; ++i) {
      p_.swap_counts[row + i] = static_cast<int32_t>(clamp_to<int64_t>(int64_t{loads} - int64_t{i} * top_k, 0, top_k));
    }
    for (uint32_t m = 0; m < run.rows * top_k && p_.plan; ++m) {
      p_.plan[base + m] = SwapRow::invalid();
      if (m >= loads) continue;
      const Wanted& wanted = set_[set_.missing()[m]];
      p_.plan[base + m] = {wanted.id, row_of(run, wanted.slot), wanted.reference};
    }
  }

  void write_padding(uint32_t row) const {
    const uint32_t top_k = p_.top_k.divisor;
    const int64_t base = static_cast<int64_t>(row) * top_k;
    for (uint32_t c = 0; c < top_k; ++c) {
      p_.hot[base + c] = -1;
      if (p_.resolved) p_.resolved[base + c] = -1;
      if (p_.mask) p_.mask[base + c] = 0;
      if (p_.attention) p_.attention[row * p_.attention_stride + c] = -1;
      if (p_.plan) p_.plan[base + c] = SwapRow::invalid();
    }
    if (p_.valid) p_.valid[row * p_.valid_stride] = 0;
    if (p_.swap_counts) p_.swap_counts[row] = 0;
  }

  const ResolveParams& p_;
  const bool copy_;
  SetResolver set_;
  std::vector<Location> columns_;  // of the run's references
  std::vector<uint32_t> index_;    // of each reference in set_
  uint32_t pending_ = 0;           // references
};

void copy_row(const Caches& c, RowCopy copy) {
  if (!copy.wanted(c)) return;
  char* to = c.hot + hot_offset(c, static_cast<uint32_t>(copy.hot_row));
  const auto bytes = static_cast<std::size_t>(c.row_bytes);
  if (copy.host_row < c.host_rows) {
    std::memcpy(to, c.host + copy.host_row * c.row_bytes, bytes);
  } else {
    std::memset(to, 0, bytes);
  }
}

Status resolve_rows(const ResolveParams& p, bool copy) {
  Resolver resolver(p, copy);
  for (uint32_t row = 0; row < p.rows; ++row) resolver.resolve(row);
  return 0;
}

}  // namespace

bool find_union_fault(const ResolveParams& p, UnionFault& fault) {
  if (p.max_union_rows == 0 || p.request_ids == nullptr) return false;
  Resolver resolver(p, false);
  for (uint32_t row = 0; row < p.rows;) {
    Run run = run_at(p, row);
    if (run.kind != RowKind::kFirst) {
      ++row;
      continue;
    }
    while (row + run.rows < p.rows && p.request_ids[row + run.rows] == run.request) ++run.rows;
    fault = {run.rows > p.max_union_rows, run.request, row, run.rows, 0};
    if (!fault.too_long && run.rows > 1) fault.distinct = resolver.collect(run, row);
    if (fault.too_long || fault.distinct > p.hot_slots) return true;
    row += run.rows;
  }
  return false;
}

bool device_can_read(const void*, Queue) {
  return true;
}

int64_t workspace_bytes(const ResolveParams&, bool, Queue) {
  return 0;
}

Status run_resolve(const ResolveParams& p, char*, Queue) {
  return resolve_rows(p, false);
}

Status run_swap_in(const ResolveParams& p, char*, Queue) {
  return resolve_rows(p, true);
}

Status run_gather(const GatherParams& p, Queue) {
  for (uint32_t row = 0; row < p.rows; ++row) {
    const int64_t base = static_cast<int64_t>(row) * p.top_k;
    const bool padding = p.row_states != nullptr && p.row_states[row] < 0;
    const uint32_t count = p.mask != nullptr ? p.top_k : listed(p, row);
    for (uint32_t c = 0; c < count; ++c) {
      const RowCopy copy = copy_at(p, base + c);
      if (p.attention) {
        p.attention[base + c] =
            padding ? -1 : attention_index(p.caches, p.attention_block_stride, static_cast<int32_t>(copy.hot_row));
      }
      if (!padding && (p.mask == nullptr || p.mask[base + c] != 0)) copy_row(p.caches, copy);
    }
  }
  return 0;
}

Status run_invalidate(const InvalidateParams& p, Queue) {
  for (uint32_t i = 0; i < p.tokens; ++i) {
    const auto request = static_cast<uint32_t>(p.request_of_token[i]);
    if (request >= p.num_request_states || p.written[i] < 0 || p.written[i] > kMaxInt32) continue;
    const auto state = static_cast<uint32_t>(p.request_states[request]);
    if (state >= p.state_rows) continue;
    int32_t* dgi = p.dgi + static_cast<int64_t>(state) * p.hot_slots;
    std::replace(dgi, dgi + p.hot_slots, static_cast<int32_t>(p.written[i]), -1);
  }
  return 0;
}

const char* status_text(Status) {
  return "ok";
}

}  // namespace hotplan::hisparse
