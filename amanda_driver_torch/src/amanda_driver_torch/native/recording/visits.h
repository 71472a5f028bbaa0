// Digests of what modules read and wrote, or of all values of a step, instead of each value.
//
// It follows `amanda_tools.fingerprint.visits`, which does the same for all frameworks.
#pragma once

#include <cstdint>
#include <vector>

#include "recording/rows.h"
#include "table.h"

namespace amanda {

// A module and a phase, which visits are of.
struct Group {
    uint32_t number = 0;
    uint64_t digest = 0;
};

// The visits in progress of all threads. Rows of those that end are added to `rows`.
class Visits {
  public:
    // Whether a step has one digest, of all visits, and visits have no rows.
    bool of_steps = false;

    // Each of these begins a visit if the thread of `row` is in none of this group. The visit then
    // has the order of `row`.

    // Returns the number of the visit, from 1 on.
    uint32_t enter(const Group& group, const Row& row, std::vector<Row>* rows) {
        return visit_of(group, row, rows).number;
    }
    // Adds that an operator ran, by its digest.
    void add_execution(const Group& group, const Row& row, uint64_t op, std::vector<Row>* rows);
    // Adds the value of a row, with the digests of the operator and of the value's type.
    void add(const Group& group, const Row& row, uint64_t op, uint64_t type,
             std::vector<Row>* rows);

    // Adds rows of the visits in progress, and begins anew if they end. With digests of steps,
    // their sum includes these visits.
    void close(uint32_t step, bool end, std::vector<Row>* rows);

    // The digest of the step that `close` found: the sum of those of visits, the flags of values
    // that are not in it, and the order of the first visit, or NOBODY.
    struct Sum {
        uint64_t digest = 0;
        uint8_t left_out = 0;
        uint32_t order = NOBODY;
    } closed;

  private:
    struct Visit {
        Group group;
        uint32_t number = 0, order = 0, execution = 0;  // the number is 0 if it has ended
        uint16_t thread = 0;
        // What the digests of its inputs and outputs are of, and flags of what is not in them.
        std::vector<uint8_t> content[2];
        uint8_t left_out[2] = {};
    };

    Visit& visit_of(const Group& group, const Row& row, std::vector<Row>* rows);
    void write(const Visit& visit, uint32_t step, std::vector<Row>* rows, Sum* sum) const;

    Table<Visit> visits_;               // by thread
    std::vector<uint32_t> executions_;  // how many visits each group had
    uint32_t count_ = 0;
    Sum sum_;
};

}  // namespace amanda
