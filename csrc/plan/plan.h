// The planning library's C interface: plain structs and arrays, no torch, no Python header. Its only
// callers are fastpipe/native_plan.py, schedules/ and planner/engine.py; the Python code beside
// them says what is computed. A function that does not say yes says nothing else: the Python code then finds the words.
#pragma once

#include <cstdint>
#include <exception>

extern "C" {

// Rows of a rank's columns, and the placement. `columns[r]` holds `counts[r]` entries a row, row after row.
struct PlanOrders {
  int32_t num_ranks;
  int32_t num_stages;
  int32_t num_microbatches;
  int32_t num_routes;
  const int32_t* routes;  // rank of every stage, route after route
  const int32_t* const* columns;
  const int64_t* counts;
  int32_t num_channels;     // of a program, else 0
  const int32_t* channels;  // source, destination, kind of each
  int32_t forward_only;
};

// Seconds by stage (a stage's fused seconds are given only where `has_overlapped`), by channel and by boundary.
struct PlanCosts {
  const double* forward;
  const double* backward;
  const double* backward_input;
  const double* backward_weight;
  const double* overlapped;
  int32_t has_overlapped;
  const double* latency;
  const double* bandwidth;
  const double* boundary_bytes;
};

// Tasks of a schedule, numbered rank by rank; see fastpipe/planner/tasks.py.
struct PlanTasks {
  int32_t num_ranks;
  int32_t num_tasks;
  const int32_t* first;  // of every rank, and num_tasks
  const double* seconds;
  const int32_t* source;   // two a task: those whose messages it waits for, or -1
  const double* transfer;  // two a task: seconds that those take
  int32_t num_local;
  const int32_t* local;  // pairs of tasks of one rank: the first comes before the second
  const int32_t* next;   // the same for the following microbatch, or -1
  const double* take;    // what a task holds from its start on
  const double* give;    // what its end releases
  const double* limit;   // what every rank may hold
};

// Rounds of waves and loops; see fastpipe/schedules/rounds.py.
struct PlanRounds {
  int32_t num_ranks;
  int32_t num_microbatches;
  int64_t count;           // rounds of F, and as many of I
  int64_t num_keys;        // a round is known by a number below this; the next of its microbatch is num_microbatches on
  const int32_t* forward;  // rounds of F in the order in which they start
  const int32_t* backward;  // rounds of I
  int64_t limit;            // stage activations that a rank may hold
};

// What the beam of wave_ticks.py looks for: `limit` as above, `width` beginnings a tick.
struct PlanBeam {
  int32_t num_ranks;
  int32_t num_rounds;
  int32_t num_microbatches;
  int32_t width;
  int64_t limit;
};

// F and I of every rank in their slots, rank after rank, by slot; see fastpipe/schedules/rounds.py.
struct PlanSteps {
  int32_t num_ranks;
  int32_t num_stages;
  int32_t num_microbatches;
  const int32_t* route;  // rank of every stage
  const int64_t* first;  // of every rank, and how many there are
  const int64_t* slot;
  const int32_t* kind;
  const int32_t* stage;
  const int32_t* microbatch;
  int64_t limit;  // stage activations that a rank may hold
  double forward;
  double backward_input;
  double backward_weight;
  double comm;
};

// Changes whenever a struct, a function or the meaning of either does.
int32_t fastpipe_plan_version();

// 1 if the schedule is complete and can run, else 0.
int32_t fastpipe_plan_validate_schedule(const PlanOrders* orders);

// A lowered schedule, or null where the Python code has to say why not. `ahead`: compute actions ahead of a consumer.
// `bounded`: the sends under way at most, 0 for as many as it takes to prove them complete.
void* fastpipe_plan_lower(const PlanOrders* orders, int32_t ahead, int32_t bounded);
int32_t fastpipe_plan_num_channels(const void* lowered);
void fastpipe_plan_channels(const void* lowered, int32_t* out);
int64_t fastpipe_plan_num_instructions(const void* lowered, int32_t rank);
// Fills seven rows; 0 if that could not be done.
int32_t fastpipe_plan_write(void* lowered, int32_t rank, int32_t* out);
void fastpipe_plan_free(void* lowered);

// 1 if the program cannot hang, mismatch a transfer or misuse a buffer, else 0.
int32_t fastpipe_plan_validate_program(const PlanOrders* program, const int32_t* lane_of);

// 1 if the program came to its end; starts and ends, one array a rank, are filled.
int32_t fastpipe_plan_simulate(const PlanOrders* program, const int32_t* lane_of, const PlanCosts* costs,
                               double* const* starts, double* const* ends);

// 1 if the order can run: every rank's tasks, one rank after the other. Starts and ends by task are filled.
int32_t fastpipe_plan_retime(const PlanTasks* tasks, const int32_t* order, double* starts, double* ends);

// An annealing of an order, or null if that cannot run or fit; `span`: 0 for the makespan, 1 for the span. The arrays
// of the tasks have to stay.
void* fastpipe_plan_search(const PlanTasks* tasks, const int32_t* order, int32_t span, uint64_t seed);
// Goes on for so many attempts, from one heat to the other; 0 for no memory.
int32_t fastpipe_plan_improve(void* search, int64_t attempts, double hot, double cold);
// The best order so far, and its objective; 0 for no memory.
int32_t fastpipe_plan_best(const void* search, int32_t* order, double* objective);
void fastpipe_plan_end_search(void* search);

// List scheduling by keys, `count` times; of keys, `reserves` (what has to stay free behind a task that takes memory)
// and orders there are so many rows. An objective is infinite where it came to a stop. 0 for no memory.
int32_t fastpipe_plan_construct(const PlanTasks* tasks, int32_t span, int32_t count, const double* keys,
                                const double* reserves, const double* patience, int32_t* orders, double* objectives);

// When rounds start, by a rule of wave_ticks.py; slots up to the last end, 0 if that is not below `cutoff` or the rule
// gets stuck, -1 for no memory. Ticks and rounds are filled, twice `count` of each.
int64_t fastpipe_plan_compact(const PlanRounds* rounds, const int32_t* rule, int64_t cutoff, int64_t* ticks,
                              int32_t* keys);
int64_t fastpipe_plan_slack(const PlanRounds* rounds, const int32_t* rule, int64_t cutoff, int64_t* ticks,
                            int32_t* keys);

// The same by beam search: the ticks that it takes, so that no more than `length` slots are needed. `budget`: the
// choices that may be looked at; what is left of them is written there.
int64_t fastpipe_plan_beam(const PlanBeam* given, int64_t length, int64_t* budget, int64_t* ticks, int32_t* keys);

// The same for a loop: the slots of the rounds of F and of I, `count` of each.
int64_t fastpipe_plan_loop(const PlanRounds* rounds, int64_t cutoff, int64_t* forward, int64_t* backward);

// Steps with their W, and the makespan. Three rows (kind, stage, microbatch), rank after rank, half as many again as
// there were. 0 if a rank cannot keep the limit, -1 for no memory or for steps that are none.
int32_t fastpipe_plan_fill(const PlanSteps* steps, int32_t* rows, double* makespan);
}

namespace fastpipe::plan {

// What a function of the interface returns; `otherwise` where something is thrown, as for lack of memory.
template <typename Result, typename Call>
Result guarded(Result otherwise, const Call& call) {
  try {
    return call();
  } catch (const std::exception&) {
    return otherwise;
  }
}

}  // namespace fastpipe::plan
