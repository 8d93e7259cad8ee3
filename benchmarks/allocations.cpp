// Counts the calls of operator new that one shared library makes itself, by the place they come from. Preloaded by
// benchmarks/allocations.py, which builds it.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

struct Place {
  std::atomic<std::uintptr_t> address{0};
  std::atomic<std::uint64_t> calls{0};
};

std::array<Place, 4096> places;
std::atomic<std::uintptr_t> lowest{0};
std::atomic<std::uintptr_t> highest{0};
std::atomic<std::uint64_t> all{0};

void count(void* from) {
  if (highest.load(std::memory_order_relaxed) == 0) return;
  all.fetch_add(1, std::memory_order_relaxed);
  const auto address = reinterpret_cast<std::uintptr_t>(from);
  if (address < lowest || address >= highest) return;
  for (std::size_t i = address % places.size();; i = (i + 1) % places.size()) {
    std::uintptr_t found = places[i].address.load();
    if (found == 0 && places[i].address.compare_exchange_strong(found, address)) found = address;
    if (found != address) continue;
    places[i].calls.fetch_add(1, std::memory_order_relaxed);
    return;
  }
}

void* allocate(std::size_t size, void* from) {
  count(from);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t size) {
  return allocate(size, __builtin_return_address(0));
}
void* operator new[](std::size_t size) {
  return allocate(size, __builtin_return_address(0));
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}

// Counts from now on what comes from [begin, end); nothing where both are 0.
extern "C" void allocations_begin(std::uintptr_t begin, std::uintptr_t end) {
  for (Place& place : places) {
    place.address = 0;
    place.calls = 0;
  }
  all = 0;
  lowest = begin;
  highest = end;
}

// Fills `addresses` and `calls`, and returns how many there are; `total`: those of everybody.
extern "C" std::size_t allocations_end(std::uintptr_t* addresses, std::uint64_t* calls, std::size_t capacity,
                                       std::uint64_t* total) {
  highest = 0;
  *total = all;
  std::size_t found = 0;
  for (const Place& place : places) {
    if (place.address == 0 || found == capacity) continue;
    addresses[found] = place.address;
    calls[found++] = place.calls;
  }
  return found;
}
