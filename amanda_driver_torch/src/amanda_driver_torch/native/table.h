// Containers of the fast path: hashing, a hash table, counted references.
#pragma once

#include "amanda_identity.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// A model's own code and data fill the cache, so whatever runs at every operator is loaded again
// each time. It is kept together in memory, apart from code that runs rarely.
#if defined(__GNUC__)
#define HOT __attribute__((hot, noinline))
#define COLD __attribute__((cold, noinline))
#define INLINE __attribute__((always_inline)) inline
#else
#define HOT
#define COLD
#define INLINE inline
#endif

namespace amanda {

inline uint64_t mix(uint64_t hash, uint64_t value) { return amanda_mix(hash, value); }

// Open addressing; keys are well mixed or pointers. Single entries are never removed.
template <class Value>
class Table {
  public:
    Value* find(uint64_t key) {
        if (slots_.empty()) return nullptr;
        for (size_t i = start(key);; ++i) {
            Slot& slot = slots_[i & mask()];
            if (!slot.used) return nullptr;
            if (slot.key == key) return &slot.value;
        }
    }

    // Returns the value of `key`, creating it if there is none. Invalidates pointers into the
    // table.
    Value& at(uint64_t key) {
        if ((size_ + 1) * 2 > slots_.size()) grow();
        for (size_t i = start(key);; ++i) {
            Slot& slot = slots_[i & mask()];
            if (slot.used && slot.key != key) continue;
            if (!slot.used) {
                slot.used = true;
                slot.key = key;
                ++size_;
            }
            return slot.value;
        }
    }

    size_t size() const { return size_; }

    void clear() {
        std::vector<Slot> gone;
        gone.swap(slots_);
        size_ = 0;
    }

    template <class Visit>
    void each(Visit visit) {
        for (Slot& slot : slots_) {
            if (slot.used) visit(slot.value);
        }
    }

  private:
    struct Slot {
        uint64_t key = 0;
        bool used = false;
        Value value{};
    };

    size_t mask() const { return slots_.size() - 1; }
    size_t start(uint64_t key) const { return size_t((key * 0x9E3779B97F4A7C15u) >> 32); }

    void grow() {
        std::vector<Slot> old(slots_.empty() ? 8 : slots_.size() * 2);
        old.swap(slots_);
        size_ = 0;
        for (Slot& slot : old) {
            if (slot.used) at(slot.key) = std::move(slot.value);
        }
    }

    std::vector<Slot> slots_;
    size_t size_ = 0;
};

inline uint64_t key_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) >> 4; }

// A pointer to an object with its own reference count (`references`), under the GIL.
template <class T>
class Shared {
  public:
    Shared() = default;
    explicit Shared(T* target) : target_(target) { retain(); }
    Shared(const Shared& other) : target_(other.target_) { retain(); }
    Shared(Shared&& other) noexcept : target_(std::exchange(other.target_, nullptr)) {}
    ~Shared() { drop(); }

    Shared& operator=(Shared other) noexcept {
        std::swap(target_, other.target_);
        return *this;
    }

    T* get() const { return target_; }
    T* operator->() const { return target_; }
    explicit operator bool() const { return target_ != nullptr; }

  private:
    void retain() {
        if (target_ != nullptr) ++target_->references;
    }
    void drop() {
        if (target_ != nullptr && --target_->references == 0) destroy();
    }
    COLD void destroy() { delete target_; }

    T* target_ = nullptr;
};

}  // namespace amanda
