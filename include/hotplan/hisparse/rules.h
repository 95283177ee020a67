/// \file rules.h
/// \brief Where things are: launch row -> request -> state row, token -> id, slot -> hot row.
///
/// Each rule exists once. The CPU backend and the kernels call the same functions.
#pragma once

#include <hotplan/hisparse/hash.h>
#include <hotplan/hisparse/params.h>

namespace hotplan::hisparse {

// ---------------------------------------------------------------------------------------------------------------------
// Requests
// ---------------------------------------------------------------------------------------------------------------------

HOTPLAN_HD int32_t request_of(const ResolveParams& p, uint32_t row) {
  return p.request_ids == nullptr ? static_cast<int32_t>(row) : p.request_ids[row];
}

/// The state row of a request, or -1 for padding. A request without hot pages cannot be resolved: padding, too.
HOTPLAN_HD int32_t state_of(const ResolveParams& p, int32_t request) {
  const auto index = static_cast<uint32_t>(request);  // negative requests become too large ones
  if (index >= p.tables.hot.rows) return -1;
  int32_t state = request;
  if (p.request_states != nullptr) state = index < p.num_request_states ? p.request_states[index] : -1;
  return static_cast<uint32_t>(state) < p.state_rows ? state : -1;
}

/// Whether a launch row starts a set, belongs to the one before it, or is padding.
enum class RowKind : uint32_t { kFirst, kFollower, kPadding };

struct Run {
  RowKind kind;
  int32_t request;
  int32_t state;
  uint32_t rows;  // kFirst: launch rows that are resolved together
};

// ---------------------------------------------------------------------------------------------------------------------
// Tokens
// ---------------------------------------------------------------------------------------------------------------------

/// Entry of a page table, or -1, which no table takes for a page, where the table does not reach.
HOTPLAN_HD int32_t page_at(const BlockTable& table, int32_t request, uint32_t page) {
  const auto row = static_cast<uint32_t>(request);
  return row < table.rows && page < table.columns ? table.data[row * table.stride + page] : -1;
}

/// The pages of a token, apart from their use: several tokens' reads can be under way at once.
struct TokenPages {
  int32_t source;
  int32_t resident;
};

HOTPLAN_HD TokenPages look_up(const ResolveParams& p, int32_t request, int32_t token) {
  TokenPages pages{-1, -1};
  if (token < 0) return pages;
  const auto t = static_cast<uint32_t>(token);
  if (p.tables.source.data) pages.source = page_at(p.tables.source, request, p.tables.source_block_size.div(t));
  if (p.tables.resident.data) pages.resident = page_at(p.tables.resident, request, p.caches.block_size.div(t));
  return pages;
}

/// A top-k column: its id in the host pool or -1, and the row that holds it already or -1.
struct Location {
  int32_t id;
  int32_t resident;

  HOTPLAN_HD bool pending() const {
    return id >= 0 && resident < 0;
  }
  HOTPLAN_HD bool valid() const {
    return id >= 0 || resident >= 0;
  }
};

HOTPLAN_HD Location locate(const ResolveParams& p, int32_t token, TokenPages pages) {
  Location at{-1, -1};
  const auto t = static_cast<uint32_t>(token);
  int64_t id = token;
  if (p.tables.source.data) {
    const FastDiv& size = p.tables.source_block_size;
    id = pages.source > 0 ? static_cast<int64_t>(pages.source) * size.divisor + size.mod(t) : -1;
  }
  if (id >= 0 && id < p.tables.id_limit) at.id = static_cast<int32_t>(id);
  if (pages.resident >= 0 && pages.resident != p.tables.resident_null) {
    const FastDiv& size = p.caches.block_size;
    at.resident = fit_int32(static_cast<int64_t>(pages.resident) * size.divisor + size.mod(t));
  }
  return at;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows
// ---------------------------------------------------------------------------------------------------------------------

/// Hot row of a slot whose page is `page`, or -1 where that is no page of the cache.
HOTPLAN_HD int32_t hot_row(const Caches& c, int32_t page, uint32_t slot) {
  if (static_cast<uint32_t>(page) >= c.blocks) return -1;
  return static_cast<int32_t>(page * c.block_size.divisor + c.block_size.mod(slot));
}

HOTPLAN_HD int32_t attention_index(const Caches& c, int64_t attention_block_stride, int32_t row) {
  if (row < 0) return -1;
  const auto r = static_cast<uint32_t>(row);
  return fit_int32(static_cast<int64_t>(c.block_size.div(r)) * attention_block_stride + c.block_size.mod(r));
}

/// Offset in bytes of a hot row.
HOTPLAN_HD int64_t hot_offset(const Caches& c, uint32_t row) {
  return c.block_size.div(row) * c.block_stride + c.block_size.mod(row) * c.row_bytes;
}

/// Copies that a launch row lists, whatever its count says.
HOTPLAN_HD uint32_t listed(const GatherParams& p, uint32_t row) {
  return static_cast<uint32_t>(clamp_to<int64_t>(p.counts[row], 0, p.top_k));
}

/// A copy: what may be any number, as the caller's lists have it.
struct RowCopy {
  int64_t host_row;
  int64_t hot_row;

  HOTPLAN_HD bool wanted(const Caches& c) const {
    return host_row >= 0 && hot_row >= 0 && hot_row < c.hot_rows;
  }
};

HOTPLAN_HD RowCopy copy_at(const GatherParams& p, int64_t index) {
  if (p.plan != nullptr) return {p.plan[index].host_row, p.plan[index].hot_row};
  return {p.host_rows[index], p.hot_rows[index]};
}

}  // namespace hotplan::hisparse
