//! Flushes over paths whose controllers have caches of their own, in simulated time.

use tenmil_base::{IoStatus, Memory, Operation, Span};

use super::multipath::Field;
use super::target::BLOCK;
use super::turning::Turning;
use crate::caches::CacheScope;
use crate::multipath::{IoPolicy, PathEvent};

impl Field {
    /// Writes the first `count` cells of eight blocks, one after the other.
    #[track_caller]
    fn write_cells(&mut self, count: u64) {
        for cell in 0..count {
            let place = self.place(cell, 8);
            self.regions.fill(place, u8::try_from(cell + 1).unwrap()).unwrap();
            assert_eq!(self.run(Operation::Write, cell * 8, place), IoStatus::SUCCESS);
        }
    }

    #[track_caller]
    fn run_flush(&mut self) -> IoStatus {
        let nothing = self.place(0, 0);
        self.run(Operation::Flush, 0, nothing)
    }

    /// Number of cells that would survive a power failure.
    fn durable_cells(&self, count: usize) -> usize {
        let durable = self.targets[0].state().durable.lock().unwrap().clone();
        let is_there = |cell: &usize| {
            let bytes = &durable[cell * 8 * BLOCK..][..8 * BLOCK];
            bytes.iter().all(|byte| usize::from(*byte) == cell + 1)
        };
        (0..count).filter(is_there).count()
    }

    fn flushes(&self) -> Vec<u64> {
        self.targets.iter().map(|target| target.state().flushes).collect()
    }
}

#[test]
fn a_flush_reaches_every_controller_that_has_answered_writes_and_no_other() {
    for cache in [CacheScope::Shared, CacheScope::Separate] {
        let mut field = Field::with_caches(3, IoPolicy::RoundRobin, cache);
        field.write_cells(2);
        assert_eq!(field.durable_cells(2), 0);
        assert_eq!(field.run_flush(), IoStatus::SUCCESS);
        assert_eq!((field.durable_cells(2), field.flushes().iter().sum::<u64>()), (2, 2));
        assert_eq!(field.run_flush(), IoStatus::SUCCESS);
        assert_eq!(
            field.flushes().iter().sum::<u64>(),
            3,
            "no controller owes a flush, and one is sent"
        );
        field.write_cells(6);
        let before = field.flushes();
        assert_eq!(field.run_flush(), IoStatus::SUCCESS);
        let each: Vec<u64> = field.flushes().iter().zip(before).map(|(now, it)| now - it).collect();
        assert_eq!((field.durable_cells(6), each), (6, vec![1, 1, 1]), "{cache:?}");
    }
}

#[test]
fn a_flush_of_one_queue_covers_the_writes_of_another() {
    let mut field = Field::with_caches(2, IoPolicy::RoundRobin, CacheScope::Separate);
    field.write_cells(4);
    field.queues.clear();
    field.turn();
    field.add_queue();
    field.turn_until(|field| field.queues[0].open_paths() == 2);
    assert_eq!(field.run_flush(), IoStatus::SUCCESS);
    assert_eq!(field.durable_cells(4), 4);
}

#[test]
fn what_is_answered_while_a_flush_is_under_way_is_flushed_by_the_next() {
    let mut field = Field::with_caches(2, IoPolicy::ActivePassive, CacheScope::Separate);
    field.write_cells(1);
    let (nothing, place) = (field.place(0, 0), field.place(1, 8));
    field.regions.fill(place, 2).unwrap();
    // The flush is executed before the write, and completes after it.
    assert!(field.submit(Operation::Flush, 0, nothing, 1));
    assert!(field.submit(Operation::Write, 8, place, 2));
    field.turn_until(|field| field.completions.len() == 2);
    field.completions.clear();
    assert_eq!(field.durable_cells(2), 1);
    assert_eq!(field.run_flush(), IoStatus::SUCCESS);
    assert_eq!(field.durable_cells(2), 2);
}

/// Completed writes are lost before the flush or during it.
#[test]
fn writes_that_are_lost_with_a_controller_are_told_once_where_caches_are_separate() {
    for is_early in [true, false] {
        for (cache, expected) in
            [(CacheScope::Shared, IoStatus::SUCCESS), (CacheScope::Separate, IoStatus::WRITE_FAULT)]
        {
            let mut field = Field::with_caches(2, IoPolicy::RoundRobin, cache);
            field.write_cells(4);
            if is_early {
                field.take_away(1);
                let is_down = |event: &PathEvent| matches!(event, PathEvent::Down { path: 1, .. });
                field.turn_until(|field| field.events.iter().any(is_down));
            } else {
                field.targets[1].state().is_idle = true;
                let nothing = field.place(0, 0);
                assert!(field.submit(Operation::Flush, 0, nothing, 1));
                field.turn_for(Span::from_ms(5));
                assert_eq!(field.completions, [], "one of two has answered");
                field.targets[1].state().is_idle = false;
                field.take_away(1);
            }
            let outcome = if is_early {
                field.run_flush()
            } else {
                field.turn_until(|field| !field.completions.is_empty());
                field.completions.remove(0).status
            };
            assert_eq!((outcome, field.durable_cells(4)), (expected, 2), "{cache:?} {is_early}");
            field.write_cells(4);
            // A loss that the queue detected first may be reported once more.
            if !is_early {
                let _ = field.run_flush();
            }
            assert_eq!(field.run_flush(), IoStatus::SUCCESS, "{cache:?} {is_early}");
            assert_eq!(field.durable_cells(4), 4);
        }
    }
}

/// The returning controller has an empty cache; the flushed one had nothing to lose.
#[test]
fn nothing_is_said_to_be_lost_with_a_controller_that_was_flushed() {
    let mut field = Field::with_caches(2, IoPolicy::RoundRobin, CacheScope::Separate);
    field.write_cells(4);
    assert_eq!(field.run_flush(), IoStatus::SUCCESS);
    field.take_away(1);
    assert_eq!(field.run_flush(), IoStatus::SUCCESS);
    field.targets[1].state().is_away = false;
    field.turn_until(|field| field.queues[0].open_paths() == 2);
    field.write_cells(6);
    assert_eq!(field.run_flush(), IoStatus::SUCCESS);
    assert_eq!(field.durable_cells(6), 6);
}

#[test]
fn a_flush_that_a_controller_refuses_is_refused() {
    let mut field = Field::with_caches(2, IoPolicy::RoundRobin, CacheScope::Shared);
    field.write_cells(4);
    field.targets[1].state().status_override = Some(tenmil_wire::Status::INTERNAL_ERROR);
    assert_eq!(field.run_flush(), IoStatus::INTERNAL_ERROR);
    field.targets[1].state().status_override = None;
    assert_eq!(field.run_flush(), IoStatus::SUCCESS);
    assert_eq!(field.durable_cells(4), 4);
}

#[test]
fn a_flush_waits_for_a_controller_that_rests() {
    let mut field = Field::with_caches(2, IoPolicy::ActivePassive, CacheScope::Separate);
    field.write_cells(2);
    field.targets[0].state().status_override = Some(tenmil_wire::Status::INTERNAL_PATH_ERROR);
    let nothing = field.place(0, 0);
    assert!(field.submit(Operation::Flush, 0, nothing, 1));
    field.turn_for(Span::from_ms(50));
    assert_eq!(field.completions, []);
    field.targets[0].state().status_override = None;
    field.turn_until(|field| !field.completions.is_empty());
    assert_eq!((field.completions[0].status, field.durable_cells(2)), (IoStatus::SUCCESS, 2));
}

/// A host that assumes no volatile cache sends no flushes.
#[test]
fn a_path_with_a_cache_is_not_used_where_the_first_has_none() {
    let mut field = Field::new(2, IoPolicy::RoundRobin);
    let identity = field.targets[1].state().identity.clone().with(|it| it.vwcp(true));
    field.targets[1].state().identity = identity;
    field.turn_until(|field| field.events.len() == 2);
    let told: Vec<String> = field.events.iter().map(ToString::to_string).collect();
    let expected = "path 1 is not used: it has a volatile write cache, expected none";
    assert!(told[1].starts_with(expected), "{told:?}");
}

/// As when a target with two addresses loses power, and returns before the host has noticed much.
#[test]
fn shared_cache_is_lost_with_all_its_controllers() {
    for count in [1, 2] {
        let mut field = Field::with_caches(count, IoPolicy::RoundRobin, CacheScope::Shared);
        field.write_cells(4);
        (0..count).for_each(|path| field.take_away(path));
        field.turn_until(|field| (0..count).all(|path| field.multipath.access(path).is_none()));
        field.targets.iter().for_each(|target| target.state().is_away = false);
        field.turn_until(|field| field.queues[0].open_paths() == count);
        assert_eq!(field.run_flush(), IoStatus::WRITE_FAULT, "{count}");
        assert_eq!(field.run_flush(), IoStatus::SUCCESS, "{count}");
    }
}

/// Either of them may have connected first.
#[test]
fn shared_cache_outlives_one_of_its_controllers() {
    for path in [0, 1] {
        let mut field = Field::with_caches(2, IoPolicy::RoundRobin, CacheScope::Shared);
        field.turn_for(Span::from_ms(20));
        field.write_cells(4);
        field.take_away(path);
        let is_down = |field: &mut Field| field.multipath.access(path).is_none();
        field.turn_until(is_down);
        assert_eq!(field.run_flush(), IoStatus::SUCCESS, "{path}");
    }
}

#[test]
fn path_to_the_same_cache_instance_loses_nothing() {
    for cache in [CacheScope::Shared, CacheScope::Separate] {
        let mut field = Field::caching(2, IoPolicy::RoundRobin, cache);
        for target in &field.targets {
            target.state().cache = Some(tenmil_wire::cache::CacheInstance([3; 16]));
        }
        field = field.up();
        field.write_cells(4);
        field.take_away(1);
        field.turn_until(|field| field.multipath.access(1).is_none());
        assert_eq!(field.run_flush(), IoStatus::SUCCESS, "{cache:?}");
    }
}
