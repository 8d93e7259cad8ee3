// Torch's default generators while stages compute: who uses them, one after the other, and from which state.
// fastpipe/runtime/generators.py says why, and is the same for the Python executor.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace fastpipe {

// One for the process, as the generators are. It knows whether the thread that asks holds it.
class GeneratorsMutex {
 public:
  void lock();
  void unlock();
  static bool held_here();

 private:
  std::mutex mutex_;
};

GeneratorsMutex& generators_mutex();

// 64 bits from four numbers, as `microbatch_seed` of Python.
std::uint64_t microbatch_seed(std::uint64_t seed, std::int64_t step, std::int32_t stage, std::int32_t microbatch);

// The default generators during the steps of one pipeline: the CPU's, and the device's.
class Generators {
 public:
  Generators(const at::Device& device, std::optional<std::uint64_t> seed);

  void begin(std::int64_t step);
  // Whether numbers were drawn in this step outside of all regions.
  bool end() const;

 private:
  friend class RandomRegion;
  using States = std::vector<at::Tensor>;

  States states() const;
  void restore(const States& states);
  void seed(std::int32_t stage, std::int32_t microbatch);

  std::vector<at::Generator> generators_;
  std::optional<std::uint64_t> seed_;
  std::int64_t step_ = 0;
  States expected_;
  bool moved_elsewhere_ = false;
};

// What one stage does with the generators, and what is done about it; see Python's class of this name.
struct StageRandom {
  StageRandom(std::shared_ptr<Generators> generators, std::int32_t stage)
      : generators(std::move(generators)), stage(stage) {}

  // After F: a function of Python's in the graph may do anything in its backward.
  void note_graph(const torch::autograd::edge_list& roots);

  std::shared_ptr<Generators> generators;
  std::int32_t stage;
  bool guards_forward = false;
  bool guards_backward = false;
  bool watches = false;
  bool listens = false;
  bool recomputes = false;  // as far as is known
  bool drew = false;
  bool recomputed = false;
};

// Around one action of a stage. Does nothing where `random` is null.
class RandomRegion {
 public:
  enum class Kind { kForward, kBackward, kWeight };

  RandomRegion(StageRandom* random, Kind kind, std::int32_t microbatch);
  RandomRegion(const RandomRegion&) = delete;
  RandomRegion& operator=(const RandomRegion&) = delete;
  ~RandomRegion();

 private:
  void enter(std::int32_t microbatch);

  StageRandom* random_;
  Kind kind_;
  std::unique_lock<GeneratorsMutex> lock_;
  Generators::States before_;
  Generators::States start_;  // while watching
  std::uint64_t sequence_ = 0;
};

}  // namespace fastpipe
