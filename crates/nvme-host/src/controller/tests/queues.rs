//! I/O queue pairs: creation, use, resumption and deletion.

use tenmil_base::{IoStatus, Span};
use tenmil_wire::Status;

use super::{World, options};
use crate::fast_path::FastPathOptions;
use crate::queue_link::QueueState;
use crate::{ArmResult, Event, QueuePairOptions, RequestError, arm};

fn wanted(depth: u32) -> QueuePairOptions {
    QueuePairOptions { depth, vector: None, techniques: FastPathOptions::default() }
}

fn outcomes(world: &World, pair: usize) -> Vec<(u64, IoStatus)> {
    world.pairs[pair].1.iter().map(|answer| (answer.token, answer.status)).collect()
}

#[test]
fn a_queue_pair_is_created_taken_once_and_used() {
    let mut world = World::with_pairs(2);
    assert!(world.device.script().has_queue(1) && world.device.script().has_queue(2));
    assert!(world.controller.take_queue_pair(1).is_none(), "it was taken");
    for round in 0..50 {
        for token in 0..10 {
            world.submit_io(0, round * 10 + token);
        }
        world.run(Span::from_ms(2));
    }
    let answered = outcomes(&world, 0);
    assert!(answered.iter().copied().eq((0..500).map(|token| (token, IoStatus::SUCCESS))));
    assert_eq!(world.pairs[0].0.stats().nonsense, 0);
}

#[test]
fn depths_and_numbers_outside_the_limits_are_refused_before_anything_is_sent() {
    let mut world = World::ready();
    let fetched = world.device.script().fetched.len();
    for depth in [0, 1, 257] {
        let refused = world.controller.create_queue_pair(world.now, wanted(depth));
        let (found, min, max) = (depth.into(), 2, 256);
        assert_eq!(refused, Err(RequestError::OutOfRange { what: "queue depth", found, min, max }));
    }
    assert_eq!(world.device.script().fetched.len(), fetched);
    for id in 1..=8 {
        assert_eq!(world.create(None), id);
    }
    let refused = world.controller.create_queue_pair(world.now, wanted(256));
    assert_eq!(refused, Err(RequestError::QueueLimit { granted: 8 }));
    assert_eq!(refused.unwrap_err().category().exit_code(), 2);
}

#[test]
fn a_queue_pair_that_is_refused_leaves_nothing_behind() {
    for opcode in [0x05, 0x01] {
        let mut world = World::ready();
        let allocations = world.memory.allocations();
        world.device.script().refuse.insert(opcode, Status::INVALID_QUEUE_SIZE);
        let id = world.controller.create_queue_pair(world.now, wanted(16)).unwrap();
        let status = Status::INVALID_QUEUE_SIZE;
        world.run_until(|event| *event == Event::QueuePairRefused { id, status });
        assert!(world.controller.take_queue_pair(id).is_none());
        assert_eq!(world.device.script().io_queues(), 0);
        assert_eq!(world.memory.allocations(), allocations);
        world.device.script().refuse.clear();
        assert_eq!(world.create(None), id, "the identifier is free again");
    }
}

#[test]
fn many_queue_pairs_asked_for_at_once_all_come() {
    let mut world = World::ready();
    for id in 1..=8 {
        assert_eq!(world.controller.create_queue_pair(world.now, wanted(16)), Ok(id));
        assert!(world.controller.take_queue_pair(id).is_none(), "not yet");
    }
    world.run_until(|event| *event == Event::QueuePairCreated { id: 8 });
    assert!((1..=8).all(|id| world.controller.take_queue_pair(id).is_some()));
}

#[test]
fn the_vector_is_the_one_asked_for() {
    let mut world = World::ready();
    world.create(None);
    world.create(Some(3));
    let script = world.device.script();
    assert_eq!(script.vectors.get(&1), Some(&None));
    assert_eq!(script.vectors.get(&2), Some(&Some(3)));
}

#[test]
fn deleting_lets_what_is_in_flight_complete_first() {
    let mut world = World::with_pairs(1);
    let allocations = world.memory.allocations();
    for token in 0..5 {
        world.submit_io(0, token);
    }
    world.controller.delete_queue_pair(world.now, 1).unwrap();
    world.run_until(|event| *event == Event::QueuePairDeleted { id: 1 });
    world.run(Span::from_ms(20));
    assert!(outcomes(&world, 0).into_iter().eq((0..5).map(|token| (token, IoStatus::SUCCESS))));
    assert_eq!(world.device.script().io_queues(), 0);
    world.assert_order(0, QueueState::Dead);
    assert_eq!(world.memory.allocations(), allocations - 2, "the rings are given back");
    assert_eq!(
        world.controller.delete_queue_pair(world.now, 1),
        Err(RequestError::NoSuchQueue { id: 1 })
    );
}

#[test]
fn deleting_goes_on_without_what_does_not_complete() {
    let mut world = World::with_pairs(1);
    world.device.script().answers_io = false;
    world.submit_io(0, 7);
    world.run(Span::from_ms(1));
    world.controller.delete_queue_pair(world.now, 1).unwrap();
    let took = world.run_until(|event| *event == Event::QueuePairDeleted { id: 1 });
    assert!(took >= Span::from_ms(50) && took < Span::from_ms(70), "{took}");
    world.run(Span::from_ms(20));
    assert_eq!(outcomes(&world, 0), [(7, IoStatus::ABORTED_BY_HOST)]);
}

#[test]
fn rings_are_not_given_back_while_their_owner_may_touch_them() {
    let mut world = World::with_pairs(1);
    let allocations = world.memory.allocations();
    world.polls_pairs = false;
    world.controller.delete_queue_pair(world.now, 1).unwrap();
    world.run_until(|event| *event == Event::QueuePairDeleted { id: 1 });
    world.run(Span::from_ms(100));
    assert_eq!(world.memory.allocations(), allocations);
    world.polls_pairs = true;
    world.run(Span::from_ms(20));
    assert_eq!(world.memory.allocations(), allocations - 2);
}

#[test]
fn a_queue_pair_that_is_dropped_is_deleted_and_its_rings_given_back() {
    let mut world = World::with_pairs(2);
    let allocations = world.memory.allocations();
    world.device.script().answers_io = false;
    world.submit_io(0, 7);
    drop(world.pairs.remove(0));
    world.run_until(|event| *event == Event::QueuePairDeleted { id: 1 });
    assert!(!world.device.script().has_queue(1) && world.device.script().has_queue(2));
    assert_eq!(world.memory.allocations(), allocations - 2);

    drop(world.pairs.remove(0));
    world.controller.reset(world.now).unwrap();
    world.run_until(|event| *event == Event::Recovered);
    assert!(world.told().contains(&Event::QueuePairDeleted { id: 2 }));
    assert_eq!(world.device.script().io_queues(), 0);
    assert_eq!(world.memory.allocations(), allocations - 4);
}

#[test]
fn arming_clears_first_and_looks_then() {
    let mut world = World::with_pairs(1);
    let mut cleared = 0;
    assert_eq!(arm(&mut world.pairs[0].0, || cleared += 1), ArmResult::Armed);
    world.submit_io(0, 1);
    world.polls_pairs = false;
    world.run(Span::from_ms(5));
    assert_eq!(arm(&mut world.pairs[0].0, || cleared += 1), ArmResult::Pending);
    world.polls_pairs = true;
    world.run(Span::from_ms(5));
    assert_eq!(outcomes(&world, 0).len(), 1);
    // A completion that arrives while the signals are disarmed is seen.
    world.submit_io(0, 2);
    let now = world.now.after(Span::from_ms(5));
    let device = world.device.clone();
    let armed = arm(&mut world.pairs[0].0, || {
        device.script().turn(now);
        device.script().turn(now.after(Span::from_ms(1)));
    });
    assert_eq!(armed, ArmResult::Pending);
    assert_eq!(cleared, 2);
}

#[test]
fn shadow_doorbells_are_used_when_the_controller_takes_them() {
    let asked = crate::ControllerOptions { shadow_doorbells: true, ..options() };
    let mut world = World::ready_with(asked, |script| {
        script.identity.push((256, vec![0, 1]));
        script.has_shadows = true;
    });
    world.create(None);
    let buffers = world.device.script().shadows.unwrap();
    world.submit_io(0, 1);
    let mut tail = [0; 4];
    assert!(world.memory.device_load(buffers.0 + 8, &mut tail));
    assert_eq!(u32::from_le_bytes(tail), 1, "queue 1's tail is in the shadow buffer");
    world.run(Span::from_ms(5));
    assert_eq!(outcomes(&world, 0), [(1, IoStatus::SUCCESS)]);
}

#[test]
fn shadow_doorbells_that_work_no_more_after_a_reset_are_not_left_to_be_written_in_vain() {
    let asked = crate::ControllerOptions { shadow_doorbells: true, ..options() };
    let mut world = World::ready_with(asked, |script| {
        script.identity.push((256, vec![0, 1]));
        script.has_shadows = true;
    });
    world.create(None);
    world.device.script().has_shadows = false;
    world.controller.reset(world.now).unwrap();
    world.run_until(|event| matches!(event, Event::Dead(_)));
    let Some(Event::Dead(error)) = world.told().pop() else { panic!() };
    assert!(error.to_string().contains("doorbell buffer config"), "{error}");
}
