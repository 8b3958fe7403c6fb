//! Flushes over paths whose controllers have caches of their own, in simulated time.

use tenmil_base::{IoStatus, Memory, Operation, Span};

use super::multipath::MultipathHost;
use super::simulated_time::SimulatedTime;
use super::target::BLOCK;
use crate::cache_tracker::CacheScope;
use crate::multipath::{IoPolicy, PathEvent};

impl MultipathHost {
    /// Writes the first `count` cells of eight blocks, one after the other.
    #[track_caller]
    fn write_cells(&mut self, count: u64) {
        for cell in 0..count {
            let place = self.buffer(cell, 8);
            self.regions.fill(place, u8::try_from(cell + 1).unwrap()).unwrap();
            assert_eq!(self.run_request(Operation::Write, cell * 8, place), IoStatus::SUCCESS);
        }
    }

    #[track_caller]
    fn run_flush(&mut self) -> IoStatus {
        let nothing = self.buffer(0, 0);
        self.run_request(Operation::Flush, 0, nothing)
    }

    /// Number of cells that would survive a power failure.
    fn durable_cell_count(&self, count: usize) -> usize {
        let durable = self.targets[0].state().durable.lock().unwrap().clone();
        let is_there = |cell: &usize| {
            let bytes = &durable[cell * 8 * BLOCK..][..8 * BLOCK];
            bytes.iter().all(|byte| usize::from(*byte) == cell + 1)
        };
        (0..count).filter(is_there).count()
    }

    fn flush_counts(&self) -> Vec<u64> {
        self.targets.iter().map(|target| target.state().flushes).collect()
    }
}

#[test]
fn a_flush_reaches_every_controller_that_has_answered_writes_and_no_other() {
    for cache in [CacheScope::Shared, CacheScope::Separate] {
        let mut host = MultipathHost::with_caches(3, IoPolicy::RoundRobin, cache);
        host.write_cells(2);
        assert_eq!(host.durable_cell_count(2), 0);
        assert_eq!(host.run_flush(), IoStatus::SUCCESS);
        assert_eq!((host.durable_cell_count(2), host.flush_counts().iter().sum::<u64>()), (2, 2));
        assert_eq!(host.run_flush(), IoStatus::SUCCESS);
        assert_eq!(
            host.flush_counts().iter().sum::<u64>(),
            3,
            "no controller owes a flush, and one is sent"
        );
        host.write_cells(6);
        let before = host.flush_counts();
        assert_eq!(host.run_flush(), IoStatus::SUCCESS);
        let each: Vec<u64> =
            host.flush_counts().iter().zip(before).map(|(now, it)| now - it).collect();
        assert_eq!((host.durable_cell_count(6), each), (6, vec![1, 1, 1]), "{cache:?}");
    }
}

#[test]
fn a_flush_of_one_queue_covers_the_writes_of_another() {
    let mut host = MultipathHost::with_caches(2, IoPolicy::RoundRobin, CacheScope::Separate);
    host.write_cells(4);
    host.queues.clear();
    host.step();
    host.add_queue();
    host.run_until(|host| host.queues[0].accepting_path_count() == 2);
    assert_eq!(host.run_flush(), IoStatus::SUCCESS);
    assert_eq!(host.durable_cell_count(4), 4);
}

#[test]
fn writes_completed_during_a_flush_are_flushed_by_the_next() {
    let mut host = MultipathHost::with_caches(2, IoPolicy::ActivePassive, CacheScope::Separate);
    host.write_cells(1);
    let (nothing, place) = (host.buffer(0, 0), host.buffer(1, 8));
    host.regions.fill(place, 2).unwrap();
    // The flush is executed before the write, and completes after it.
    assert!(host.submit(Operation::Flush, 0, nothing, 1));
    assert!(host.submit(Operation::Write, 8, place, 2));
    host.run_until(|host| host.completions.len() == 2);
    host.completions.clear();
    assert_eq!(host.durable_cell_count(2), 1);
    assert_eq!(host.run_flush(), IoStatus::SUCCESS);
    assert_eq!(host.durable_cell_count(2), 2);
}

/// Completed writes are lost before the flush or during it.
#[test]
fn writes_lost_with_a_controller_are_reported_once_if_caches_are_separate() {
    for is_early in [true, false] {
        for (cache, expected) in
            [(CacheScope::Shared, IoStatus::SUCCESS), (CacheScope::Separate, IoStatus::WRITE_FAULT)]
        {
            let mut host = MultipathHost::with_caches(2, IoPolicy::RoundRobin, cache);
            host.write_cells(4);
            if is_early {
                host.disconnect_path(1);
                let is_down = |event: &PathEvent| matches!(event, PathEvent::Down { path: 1, .. });
                host.run_until(|host| host.events.iter().any(is_down));
            } else {
                host.targets[1].state().withholds_completions = true;
                let nothing = host.buffer(0, 0);
                assert!(host.submit(Operation::Flush, 0, nothing, 1));
                host.run_for(Span::from_ms(5));
                assert_eq!(host.completions, [], "one of two has answered");
                host.targets[1].state().withholds_completions = false;
                host.disconnect_path(1);
            }
            let outcome = if is_early {
                host.run_flush()
            } else {
                host.run_until(|host| !host.completions.is_empty());
                host.completions.remove(0).status
            };
            assert_eq!(
                (outcome, host.durable_cell_count(4)),
                (expected, 2),
                "{cache:?} {is_early}"
            );
            host.write_cells(4);
            // A loss that the queue detected first may be reported once more.
            if !is_early {
                let _ = host.run_flush();
            }
            assert_eq!(host.run_flush(), IoStatus::SUCCESS, "{cache:?} {is_early}");
            assert_eq!(host.durable_cell_count(4), 4);
        }
    }
}

/// The returning controller has an empty cache; the flushed one had nothing to lose.
#[test]
fn lost_controller_without_unflushed_writes_reports_no_loss() {
    let mut host = MultipathHost::with_caches(2, IoPolicy::RoundRobin, CacheScope::Separate);
    host.write_cells(4);
    assert_eq!(host.run_flush(), IoStatus::SUCCESS);
    host.disconnect_path(1);
    assert_eq!(host.run_flush(), IoStatus::SUCCESS);
    host.targets[1].state().refuses_connections = false;
    host.run_until(|host| host.queues[0].accepting_path_count() == 2);
    host.write_cells(6);
    assert_eq!(host.run_flush(), IoStatus::SUCCESS);
    assert_eq!(host.durable_cell_count(6), 6);
}

#[test]
fn flush_rejected_by_a_controller_fails() {
    let mut host = MultipathHost::with_caches(2, IoPolicy::RoundRobin, CacheScope::Shared);
    host.write_cells(4);
    host.targets[1].state().status_override = Some(tenmil_wire::Status::INTERNAL_ERROR);
    assert_eq!(host.run_flush(), IoStatus::INTERNAL_ERROR);
    host.targets[1].state().status_override = None;
    assert_eq!(host.run_flush(), IoStatus::SUCCESS);
    assert_eq!(host.durable_cell_count(4), 4);
}

#[test]
fn flush_waits_for_a_controller_in_backoff() {
    let mut host = MultipathHost::with_caches(2, IoPolicy::ActivePassive, CacheScope::Separate);
    host.write_cells(2);
    host.targets[0].state().status_override = Some(tenmil_wire::Status::INTERNAL_PATH_ERROR);
    let nothing = host.buffer(0, 0);
    assert!(host.submit(Operation::Flush, 0, nothing, 1));
    host.run_for(Span::from_ms(50));
    assert_eq!(host.completions, []);
    host.targets[0].state().status_override = None;
    host.run_until(|host| !host.completions.is_empty());
    assert_eq!((host.completions[0].status, host.durable_cell_count(2)), (IoStatus::SUCCESS, 2));
}

/// A host that assumes no volatile cache sends no flushes.
#[test]
fn a_path_with_a_cache_is_not_used_where_the_first_has_none() {
    let mut host = MultipathHost::new(2, IoPolicy::RoundRobin);
    let identity = host.targets[1].state().identity.clone().with(|it| it.vwcp(true));
    host.targets[1].state().identity = identity;
    host.run_until(|host| host.events.len() == 2);
    let reported_values: Vec<String> = host.events.iter().map(ToString::to_string).collect();
    let expected = "path 1 is not used: it has a volatile write cache, expected none";
    assert!(reported_values[1].starts_with(expected), "{reported_values:?}");
}

/// As when a target with two addresses loses power, and returns before the host has noticed much.
#[test]
fn shared_cache_is_lost_with_all_its_controllers() {
    for count in [1, 2] {
        let mut host = MultipathHost::with_caches(count, IoPolicy::RoundRobin, CacheScope::Shared);
        host.write_cells(4);
        (0..count).for_each(|path| host.disconnect_path(path));
        host.run_until(|host| (0..count).all(|path| host.multipath.ana_state(path).is_none()));
        host.targets.iter().for_each(|target| target.state().refuses_connections = false);
        host.run_until(|host| host.queues[0].accepting_path_count() == count);
        assert_eq!(host.run_flush(), IoStatus::WRITE_FAULT, "{count}");
        assert_eq!(host.run_flush(), IoStatus::SUCCESS, "{count}");
    }
}

/// Either of them may have connected first.
#[test]
fn shared_cache_outlives_one_of_its_controllers() {
    for path in [0, 1] {
        let mut host = MultipathHost::with_caches(2, IoPolicy::RoundRobin, CacheScope::Shared);
        host.run_for(Span::from_ms(20));
        host.write_cells(4);
        host.disconnect_path(path);
        let is_down = |host: &mut MultipathHost| host.multipath.ana_state(path).is_none();
        host.run_until(is_down);
        assert_eq!(host.run_flush(), IoStatus::SUCCESS, "{path}");
    }
}

#[test]
fn path_to_the_same_cache_instance_loses_nothing() {
    for cache in [CacheScope::Shared, CacheScope::Separate] {
        let mut host = MultipathHost::unconnected_with_caches(2, IoPolicy::RoundRobin, cache);
        for target in &host.targets {
            target.state().cache = Some(tenmil_wire::cache_instance::CacheInstance([3; 16]));
        }
        host = host.connect_all();
        host.write_cells(4);
        host.disconnect_path(1);
        host.run_until(|host| host.multipath.ana_state(1).is_none());
        assert_eq!(host.run_flush(), IoStatus::SUCCESS, "{cache:?}");
    }
}
