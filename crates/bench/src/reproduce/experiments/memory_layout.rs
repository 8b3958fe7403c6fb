//! Experiments on memory layout and prefetching.

use core::hint::black_box;

use crate::experiment::micro_benchmark_loops::{
    CompletionOrder, DenseSlots, IndirectSlots, PageSpacedSlots, PrefetchLoop, SlotLayout,
    sum_of_draws_by_division, sum_of_draws_by_multiplication,
};
use crate::experiment::{Experiment, Threshold, Variant};
use tenmil_base::Random;

use super::{EACH, RATE, ratio_criterion};
use crate::reproduce::BenchTask;

/// I/Os in flight: 21 SSDs at depth 128.
const IN_FLIGHT: u32 = 21 * 128;
/// Passes over all of them per reading of the clock.
const LAPS: u32 = 8;
/// 4 KiB blocks of a 1.6 TB P4600.
const PLACES: u64 = 390_703_446;
const DRAWS: u64 = 50_000;

const A_LOOP: &str = "A loop that does nothing else: in a driver there is more around it, so an I/O \
    gains less than an iteration of the loop does.";
const SLOTS: &str = "crates/bench/src/experiment/micro_benchmark_loops/slot_layouts.rs";

pub(super) fn memory_experiments() -> Vec<Experiment<BenchTask>> {
    vec![
        prefetch_distance_experiment(),
        slot_layout_experiment(),
        token_location_experiment(),
        random_lba_experiment(),
    ]
}

/// Processes completions with the slot table `T`, prefetching slots `ahead` completions ahead.
fn run_slot_table_loop<T: SlotLayout>(ahead: usize, continues: &mut dyn FnMut() -> bool) -> u64 {
    let (mut table, ring) = (T::new(IN_FLIGHT), CompletionOrder::new(IN_FLIGHT, 1));
    let mut count = 0;
    while continues() {
        black_box(PrefetchLoop(ahead).process_completions(&mut table, &ring, LAPS));
        count += u64::from(IN_FLIGHT * LAPS);
    }
    count
}

/// Draws random blocks of a device.
fn run_lba_draw_loop(
    by: fn(&mut Random, u64, u64) -> u64,
    continues: &mut dyn FnMut() -> bool,
) -> u64 {
    let mut random = Random::new(1);
    let mut count = 0;
    while continues() {
        black_box(by(&mut random, PLACES, DRAWS));
        count += DRAWS;
    }
    count
}

fn prefetch_distance_experiment() -> Experiment<BenchTask> {
    let looping = |label, run| Variant::new(label, BenchTask::Loop { source: SLOTS, run });
    let worth = |question, of| {
        ratio_criterion(question, of, "nothing ahead", RATE, Threshold::AtLeast(1.05))
    };
    Experiment {
        name: "prefetch-distance",
        claim: "Where each slot is a page from the next, fetching it one, two or four completions \
                ahead is worth more than not.",
        seeds: &[1, 2],
        seen: "one ahead; no figure",
        figures: &[RATE, EACH],
        sides: vec![
            looping("nothing ahead", |continues| {
                run_slot_table_loop::<PageSpacedSlots>(0, continues)
            }),
            looping("one ahead", |continues| run_slot_table_loop::<PageSpacedSlots>(1, continues)),
            looping("two ahead", |continues| run_slot_table_loop::<PageSpacedSlots>(2, continues)),
            looping("four ahead", |continues| run_slot_table_loop::<PageSpacedSlots>(4, continues)),
        ],
        questions: vec![
            worth("one ahead is worth", "one ahead"),
            worth("two ahead is worth", "two ahead"),
            worth("four ahead is worth", "four ahead"),
        ],
        limits: A_LOOP,
    }
}

fn slot_layout_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "slot-layout",
        claim: "Slots of sixteen bytes beside each other are found faster than slots a page apart, \
                each with its list of pages.",
        seeds: &[1, 2],
        seen: "no figure; five cache lines per I/O, 840 KiB in flight",
        figures: &[RATE, EACH],
        sides: vec![
            Variant::new(
                "dense",
                BenchTask::Loop {
                    source: SLOTS,
                    run: |continues| run_slot_table_loop::<DenseSlots>(0, continues),
                },
            ),
            Variant::new(
                "a page apart",
                BenchTask::Loop {
                    source: SLOTS,
                    run: |continues| run_slot_table_loop::<PageSpacedSlots>(0, continues),
                },
            ),
        ],
        questions: vec![ratio_criterion(
            "dense against a page apart",
            "dense",
            "a page apart",
            RATE,
            Threshold::AtLeast(1.2),
        )],
        limits: A_LOOP,
    }
}

fn token_location_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "token-beside-state",
        claim: "A token that lies beside the state of its command is allocated faster than one in \
                a request behind a pointer.",
        seeds: &[1, 2],
        seen: "half a million IOPS more, of about ten million: 5 %",
        figures: &[RATE, EACH],
        sides: vec![
            Variant::new(
                "beside the state",
                BenchTask::Loop {
                    source: SLOTS,
                    run: |continues| run_slot_table_loop::<DenseSlots>(0, continues),
                },
            ),
            Variant::new(
                "behind a pointer",
                BenchTask::Loop {
                    source: SLOTS,
                    run: |continues| run_slot_table_loop::<IndirectSlots>(0, continues),
                },
            ),
        ],
        questions: vec![ratio_criterion(
            "beside the state against behind a pointer",
            "beside the state",
            "behind a pointer",
            RATE,
            Threshold::AtLeast(1.05),
        )],
        limits: A_LOOP,
    }
}

fn random_lba_experiment() -> Experiment<BenchTask> {
    const SOURCE: &str = "crates/bench/src/experiment/micro_benchmark_loops/random_lba.rs";
    Experiment {
        name: "random-block",
        claim: "Drawing a random block by a multiplication is faster than by the remainder of a \
                division.",
        seeds: &[1],
        seen: "the division takes 6 % of all cycles",
        figures: &[RATE, EACH],
        sides: vec![
            Variant::new(
                "multiplication",
                BenchTask::Loop {
                    source: SOURCE,
                    run: |continues| run_lba_draw_loop(sum_of_draws_by_multiplication, continues),
                },
            ),
            Variant::new(
                "division",
                BenchTask::Loop {
                    source: SOURCE,
                    run: |continues| run_lba_draw_loop(sum_of_draws_by_division, continues),
                },
            ),
        ],
        questions: vec![ratio_criterion(
            "multiplication against division",
            "multiplication",
            "division",
            RATE,
            Threshold::AtLeast(1.06),
        )],
        limits: A_LOOP,
    }
}
