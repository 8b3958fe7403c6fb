//! Ring protocol under a model checker, in every order that the memory model allows.
//!
//! The files below are the production files: only the names of `sync` stand for the checker's types here.
//! Each of their barriers is omitted once, and the checker has to detect that.
//!
//! | `docs/developer/path-of-an-io.md` | one side | the other side |
//! |---|---|---|
//! | entries before doorbell | `dma/src/barrier.rs`, the doorbell's release | the doorbell's acquire |
//! | the phase after the rest of a completion | `dma/src/completion_order.rs` | the same, `barrier.rs` |
//! | a shadow doorbell and its event index | `nvme-host/src/queue_pair/shadow_doorbell.rs` | `nvme-controller/src/queue/shadow_doorbell.rs` |
//!
//! Doorbells and entries are one line each in code that needs real memory, and are repeated here:
//! `DoorbellPage`, `RegionTable::load_u32` and `store_u32`, `SharedRingEntries`.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod controller_model;
mod driver_model;
mod model_atomics;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::sync::{Condvar, Mutex};
use loom::thread;
use tenmil_base::{
    AccessFault, CompletionEntry, Doorbell, InvalidSegment, Memory, RegionId, RingEntries, Segment,
};

use controller_model::sync::AtomicU32;
use driver_model::barrier::{DeviceKind, store_barrier};
use driver_model::sync::AtomicU64;

thread_local! {
    /// All threads of a model run on one thread of the machine.
    static LEFT_OUT: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Whether the checker finds no error, with `left_out` omitted.
fn model_passes(left_out: Option<&'static str>, model: fn()) -> bool {
    LEFT_OUT.set(left_out);
    let result = std::panic::catch_unwind(|| loom::model(model));
    LEFT_OUT.set(None);
    result.is_ok()
}

/// Checks that the model holds, and fails without any one of `needed`.
fn assert_each_ordering_needed(model: fn(), needed: &[&'static str]) {
    assert!(model_passes(None, model), "as it is");
    for left_out in needed {
        assert!(!model_passes(Some(left_out), model), "the model holds without {left_out}");
    }
}

const PHASE: u64 = controller_model::order::PHASE;

/// Two words of a command, and a doorbell in the controller's registers.
fn command_model() {
    let (words, doorbell) = ([0, 0].map(AtomicU64::new), AtomicU32::new(0));
    let shared = Arc::new((words, doorbell));
    let theirs = Arc::clone(&shared);
    let driver = thread::spawn(move || {
        let (words, doorbell) = &*theirs;
        words.iter().for_each(|word| word.store(7, Ordering::Relaxed));
        // The barrier by which `CommandStore::Plain` publishes.
        store_barrier(DeviceKind::Emulated);
        doorbell.store(1, Ordering::Release);
    });
    let (words, doorbell) = &*shared;
    if doorbell.load(Ordering::Acquire) == 1 {
        words.iter().for_each(|word| assert_eq!(word.load(Ordering::Relaxed), 7));
    }
    driver.join().unwrap();
}

/// Same with a doorbell without ordering of its own, like a PCIe register: only the barrier orders.
fn command_with_plain_doorbell_model() {
    let (words, doorbell) = ([0, 0].map(AtomicU64::new), AtomicU32::new(0));
    let shared = Arc::new((words, doorbell));
    let theirs = Arc::clone(&shared);
    let driver = thread::spawn(move || {
        let (words, doorbell) = &*theirs;
        words.iter().for_each(|word| word.store(7, Ordering::Relaxed));
        store_barrier(DeviceKind::Emulated);
        doorbell.store(1, Ordering::Relaxed);
    });
    let (words, doorbell) = &*shared;
    if doorbell.load(Ordering::Acquire) == 1 {
        words.iter().for_each(|word| assert_eq!(word.load(Ordering::Relaxed), 7));
    }
    driver.join().unwrap();
}

/// A completion, in a ring of one entry that wraps: phase 1, then 0.
fn completion_model() {
    let entry = Arc::new([0, 0].map(AtomicU64::new));
    let theirs = Arc::clone(&entry);
    let controller = thread::spawn(move || {
        let [first, second] = &*theirs;
        controller_model::order::store_completion(first, second, [7, 7 | PHASE]);
        controller_model::order::store_completion(first, second, [8, 8]);
    });
    let [first, second] = &*entry;
    if let Some(found) =
        driver_model::order::load_completion_if_new(first, second, PHASE, DeviceKind::Emulated)
    {
        // It may be overwritten already, since this driver has not reported it as consumed.
        let is_whole = |found: CompletionEntry| found[0] == 7 || found[0] == 8;
        assert!(is_whole(found) && found[1] == 7 | PHASE, "{found:?}");
    }
    controller.join().unwrap();
}

/// Memory with a doorbell and an event index, ring entries, and a register that wakes the controller.
struct ModelMemory {
    shadows: [AtomicU32; 2],
    entries: [AtomicU64; RINGS as usize],
    is_rung: Mutex<bool>,
    rung: Condvar,
}

/// Number of times the driver rings.
const RINGS: u32 = 2;

#[derive(Clone)]
struct SharedWords(Arc<ModelMemory>);

/// One of the two words, as accessed by the controller.
struct AtomicWord(Arc<ModelMemory>, usize);

fn word_segment(at: u64) -> Segment {
    Segment { region: RegionId(0), offset: at, len_bytes: 4 }
}

/// Same operations as `RegionTable`.
impl Memory for SharedWords {
    fn load(&self, segment: Segment, _: &mut [u8]) -> Result<(), InvalidSegment> {
        Err(InvalidSegment(segment))
    }

    fn store(&self, segment: Segment, _: &[u8]) -> Result<(), InvalidSegment> {
        Err(InvalidSegment(segment))
    }

    fn fill(&self, segment: Segment, _: u8) -> Result<(), InvalidSegment> {
        Err(InvalidSegment(segment))
    }

    fn load_u32(&self, segment: Segment) -> Result<u32, InvalidSegment> {
        Ok(self.0.shadows[usize::try_from(segment.offset).unwrap()].load(Ordering::Acquire))
    }

    fn store_u32(&self, segment: Segment, value: u32) -> Result<(), InvalidSegment> {
        let word = &self.0.shadows[usize::try_from(segment.offset).unwrap()];
        word.store(value, Ordering::Release);
        Ok(())
    }
}

impl Doorbell for SharedWords {
    fn ring(&mut self, _: u32) {
        *self.0.is_rung.lock().unwrap() = true;
        self.0.rung.notify_one();
    }
}

/// Same operations as `SharedRingEntries`.
impl RingEntries for AtomicWord {
    fn load_command(&self, _: u32) -> Result<[u64; 8], AccessFault> {
        Err(AccessFault { iova: 0, len_bytes: 0 })
    }

    fn store_completion(&mut self, _: u32, _: CompletionEntry) -> Result<(), AccessFault> {
        Err(AccessFault { iova: 0, len_bytes: 0 })
    }

    fn load_u32(&self, _: u32) -> Result<u32, AccessFault> {
        Ok(self.0.shadows[self.1].load(Ordering::Acquire))
    }

    fn store_u32(&mut self, _: u32, value: u32) -> Result<(), AccessFault> {
        self.0.shadows[self.1].store(value, Ordering::Release);
        Ok(())
    }
}

/// A driver that rings in memory, and a controller that sleeps once it has seen everything. A missed
/// doorbell is a deadlock.
fn shadow_doorbell_model() {
    let world = Arc::new(ModelMemory {
        shadows: [0, 0].map(AtomicU32::new),
        entries: [0; RINGS as usize].map(AtomicU64::new),
        is_rung: Mutex::new(false),
        rung: Condvar::new(),
    });
    let shared = SharedWords(Arc::clone(&world));
    let mut bell = driver_model::DriverShadowDoorbell::new(
        shared.clone(),
        shared,
        word_segment(0),
        word_segment(1),
    );
    let theirs = Arc::clone(&world);
    let driver = thread::spawn(move || {
        for value in 1..=RINGS {
            theirs.entries[value as usize - 1].store(7, Ordering::Relaxed);
            store_barrier(DeviceKind::Emulated);
            bell.ring_doorbell(value);
        }
    });
    let [doorbell, event_index] = [0, 1].map(|at| AtomicWord(Arc::clone(&world), at));
    let mut bell = controller_model::ControllerShadowDoorbell::new(doorbell, event_index);
    let mut seen = 0;
    while seen < RINGS {
        let rung = bell.load_tail();
        for entry in &world.entries[seen as usize..rung as usize] {
            assert_eq!(entry.load(Ordering::Relaxed), 7);
        }
        seen = rung;
        if seen < RINGS && bell.arm(seen).is_none() {
            let mut is_rung = world.is_rung.lock().unwrap();
            while !*is_rung {
                is_rung = world.rung.wait(is_rung).unwrap();
            }
            *is_rung = false;
        }
    }
    driver.join().unwrap();
}

#[test]
fn command_is_complete_once_its_doorbell_is_visible() {
    assert_each_ordering_needed(command_model, &["acquire"]);
    assert_each_ordering_needed(
        command_with_plain_doorbell_model,
        &["acquire", "driver: release fence"],
    );
}

#[test]
fn completion_is_complete_once_its_phase_is_visible() {
    assert_each_ordering_needed(completion_model, &["release", "driver: acquire fence"]);
}

#[test]
fn shadow_doorbell_update_is_never_missed_and_its_command_complete() {
    assert_each_ordering_needed(
        shadow_doorbell_model,
        &["driver: full fence", "controller: full fence", "acquire"],
    );
}
