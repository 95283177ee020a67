/// \file set.h
/// \brief The resolution of one set on the CPU: distinct ids against one LRU row and what its slots hold. Host only.
///
/// What ids, slots and copies mean is the caller's business: residency and SGLang's tables resolve with this.
#pragma once

#include <hotplan/hisparse/hash.h>
#include <hotplan/hisparse/lru.h>

#include <algorithm>
#include <vector>

namespace hotplan::hisparse {

inline constexpr uint32_t kNone = 0xFFFFFFFFu;

/// id -> its index among the distinct ids of a set.
class IdSet {
 public:
  void reset(std::size_t references) {
    keys_.assign(max_of<std::size_t>(2 * references, 2), -1);
    values_.resize(keys_.size());
  }

  /// The index of `id`; `next` becomes its index if it is new.
  uint32_t insert(int32_t id, uint32_t next) {
    const std::size_t at = find_entry(id);
    if (keys_[at] == id) return values_[at];
    keys_[at] = id;
    return values_[at] = next;
  }

  uint32_t find(int32_t id) const {
    if (id < 0) return kNone;
    const std::size_t at = find_entry(id);
    return keys_[at] == id ? values_[at] : kNone;
  }

 private:
  std::size_t find_entry(int32_t id) const {
    std::size_t at = home_of(id, static_cast<uint32_t>(keys_.size()));
    while (keys_[at] != id && keys_[at] != -1) at = at + 1 == keys_.size() ? 0 : at + 1;
    return at;
  }

  std::vector<int32_t> keys_;
  std::vector<uint32_t> values_;
};

/// One distinct id of a set.
struct Wanted {
  int32_t id;
  uint32_t reference;  // the first that names it
  uint32_t slot;       // kNone: none holds it (yet)
  bool loaded;
};

/// Resolves sets one after the other, in three steps: `begin` and `want` say what is asked for, `find_hits` what is
/// there, `replace_victims` what goes where and in which order the slots are afterwards.
class SetResolver {
 public:
  explicit SetResolver(uint32_t slots) : order_(slots), next_(slots) {}

  /// A new set of at most `references` references.
  void begin(std::size_t references) {
    ids_.reset(references);
    wanted_.clear();
    missing_.clear();
  }

  /// The index of an id, which is not negative.
  uint32_t want(int32_t id, uint32_t reference) {
    const uint32_t index = ids_.insert(id, size());
    if (index == size()) wanted_.push_back({id, reference, kNone, false});
    return index;
  }

  uint32_t size() const {
    return static_cast<uint32_t>(wanted_.size());
  }

  const Wanted& operator[](uint32_t index) const {
    return wanted_[index];
  }

  /// Indices of the ids that no slot held, by first reference. What a caller takes out of it gets no slot.
  std::vector<uint32_t>& missing() {
    return missing_;
  }

  /// `lru` [slots]: slots from the oldest on, possibly corrupt; `held` [slots]: the id in every slot.
  template <typename Slot>
  void find_hits(const Slot* lru, const int32_t* held) {
    take_order(lru);
    hit_.assign(order_.size(), 0);
    for (const uint16_t slot : order_) {
      const uint32_t index = ids_.find(held[slot]);
      if (index == kNone) continue;
      uint32_t& mine = wanted_[index].slot;
      if (mine != kNone) hit_[mine] = 0;  // an older copy of the same id
      mine = slot;
      hit_[slot] = 1;
    }
    for (uint32_t index = 0; index < size(); ++index) {
      if (wanted_[index].slot == kNone) missing_.push_back(index);
    }
  }

  /// Gives the slots that were not hit, the oldest first, to the first of the missing ids, as many as there are, and
  /// writes the new order. Returns how many ids got one.
  template <typename Slot>
  uint32_t replace_victims(Slot* lru) {
    Partition partition{static_cast<uint32_t>(order_.size()), 0, 0};
    for (const uint8_t hit : hit_) partition.hits += hit;
    partition.loads = min_of(static_cast<uint32_t>(missing_.size()), partition.slots - partition.hits);
    uint32_t hits_before = 0;
    for (uint32_t position = 0; position < partition.slots; ++position) {
      const uint16_t slot = order_[position];
      if (hit_[slot]) {
        next_[partition.of_hit(hits_before++)] = slot;
        continue;
      }
      const uint32_t victim = position - hits_before;
      next_[partition.of_victim(victim)] = slot;
      if (victim >= partition.loads) continue;
      Wanted& wanted = wanted_[missing_[victim]];
      wanted.slot = slot;
      wanted.loaded = true;
    }
    std::transform(next_.begin(), next_.end(), lru, [](uint16_t slot) { return static_cast<Slot>(slot); });
    return partition.loads;
  }

 private:
  /// The LRU as a permutation: see "State repair" in hotplan.reference.hisparse.
  template <typename Slot>
  void take_order(const Slot* lru) {
    const auto slots = static_cast<uint32_t>(order_.size());
    hit_.assign(slots, 0);  // for now: whether a slot was seen
    uint32_t end = slots;
    for (uint32_t position = slots; position-- > 0;) {
      const auto slot = static_cast<uint32_t>(lru[position]);
      if (slot < slots && !hit_[slot]) {
        hit_[slot] = 1;
        order_[--end] = static_cast<uint16_t>(slot);
      }
    }
    for (uint32_t slot = slots; end > 0;) {
      while (hit_[--slot]) {
      }
      order_[--end] = static_cast<uint16_t>(slot);
    }
  }

  IdSet ids_;
  std::vector<Wanted> wanted_;
  std::vector<uint32_t> missing_;
  std::vector<uint16_t> order_;
  std::vector<uint16_t> next_;
  std::vector<uint8_t> hit_;  // by slot
};

}  // namespace hotplan::hisparse
