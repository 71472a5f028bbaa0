#include "recording/visits.h"

#include <algorithm>
#include <cstring>

#include "recording/xxh3.h"

namespace amanda {

namespace {

// Flags of values that are not in a digest. The positions of the rows that say so begin with 1.
constexpr uint8_t LEFT_OUT[] = {UNREADABLE, UNWRITTEN};

template <class... Numbers>
void append(std::vector<uint8_t>* content, Numbers... numbers) {
    size_t at = content->size();
    content->resize(at + (sizeof numbers + ...));
    ((std::memcpy(content->data() + at, &numbers, sizeof numbers), at += sizeof numbers), ...);
}

}  // namespace

Visits::Visit& Visits::visit_of(const Group& group, const Row& row, std::vector<Row>* rows) {
    Visit& visit = visits_.at(row.thread);
    if (visit.number != 0) {
        if (visit.group.number == group.number) return visit;
        write(visit, row.step, rows, &sum_);
    }
    if (executions_.size() <= group.number) executions_.resize(group.number + 1);
    visit.group = group;
    visit.number = ++count_;
    visit.order = row.order;
    visit.execution = executions_[group.number]++;
    visit.thread = row.thread;
    for (size_t i = 0; i < 2; ++i) {
        visit.content[i].clear();
        visit.left_out[i] = 0;
    }
    return visit;
}

void Visits::add_execution(const Group& group, const Row& row, uint64_t op,
                           std::vector<Row>* rows) {
    append(&visit_of(group, row, rows).content[OUTPUT - INPUT], op);
}

void Visits::add(const Group& group, const Row& row, uint64_t op, uint64_t type,
                 std::vector<Row>* rows) {
    Visit& visit = visit_of(group, row, rows);
    size_t which = row.what - INPUT;
    if (row.flags & (UNWRITTEN | UNREADABLE)) {
        visit.left_out[which] |= row.flags & UNWRITTEN ? UNWRITTEN : UNREADABLE;
    } else {
        append(&visit.content[which], op, type, row.digest, row.position, row.item);
    }
}

void Visits::write(const Visit& visit, uint32_t step, std::vector<Row>* rows, Sum* sum) const {
    uint64_t digests[3] = {visit.group.digest};
    for (size_t i = 0; i < 2; ++i) {
        digests[i + 1] = xxh3(visit.content[i].data(), visit.content[i].size());
    }
    if (of_steps) {
        sum->digest += xxh3(digests, sizeof digests);
        sum->left_out |= visit.left_out[0] | visit.left_out[1];
        sum->order = std::min(sum->order, visit.order);
        return;
    }
    auto add = [&](uint8_t what, size_t position, uint8_t flags, uint64_t digest) {
        rows->push_back({visit.order, visit.group.number, step, visit.execution, NOBODY, NOBODY,
                         uint16_t(position), NO_ITEM, what, flags, visit.thread, digest, 0, 0});
    };
    add(INPUT, 0, 0, digests[1]);
    add(OUTPUT, 0, 0, digests[2]);
    for (uint8_t what : {INPUT, OUTPUT}) {
        for (size_t i = 0; i < 2; ++i) {
            if (visit.left_out[what - INPUT] & LEFT_OUT[i]) add(what, i + 1, LEFT_OUT[i], 0);
        }
    }
}

void Visits::close(uint32_t step, bool end, std::vector<Row>* rows) {
    closed = sum_;
    visits_.each([&](Visit& visit) {
        if (visit.number != 0) write(visit, step, rows, &closed);
        if (end) visit.number = 0;
    });
    if (end) sum_ = Sum();
}

}  // namespace amanda
