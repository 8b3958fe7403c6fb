//! Shutdown, removal, and drop.

use tenmil_base::{IoStatus, Span};

use super::{World, options};
use crate::queue_link::QueueState;
use crate::{
    Controller, ControllerOptions, Event, Quirks, RequestError, ShutdownNotification, State,
};

fn end(world: &mut World) -> Span {
    world.run_until(|event| matches!(event, Event::ShutDown { .. } | Event::Removed))
}

#[test]
fn a_shutdown_drains_deletes_notifies_and_switches_off() {
    let mut world = World::with_pairs(2);
    for token in 0..5 {
        world.submit_io(0, token);
    }
    world.controller.shut_down(world.now, ShutdownNotification::Normal).unwrap();
    world.assert_state(State::ShuttingDown);
    end(&mut world);
    assert_eq!(world.told().pop(), Some(Event::ShutDown { is_clean: true }));
    world.assert_state(State::ShutDown);
    let fetched = world.device.script().fetched.clone();
    let last: Vec<u8> = fetched.iter().rev().take(4).map(|(opcode, _)| *opcode).collect();
    assert_eq!(last, [4, 4, 0, 0], "submission queues before completion queues");
    assert_eq!(world.device.script().notified, Some(1));
    assert!(!world.device.script().is_enabled());
    world.run(Span::from_ms(20));
    let completions: Vec<_> = world.pairs[0].1.iter().map(|answer| answer.status).collect();
    assert_eq!(completions, [IoStatus::SUCCESS; 5]);
    world.assert_order(0, QueueState::Dead);
    assert_eq!(world.device.script().faults, []);
}

#[test]
fn an_abrupt_shutdown_waits_for_nothing() {
    let mut world = World::with_pairs(1);
    world.device.script().answers_io = false;
    world.submit_io(0, 7);
    world.submit_admin(5, 0x0a);
    world.controller.shut_down(world.now, ShutdownNotification::Abrupt).unwrap();
    let took = end(&mut world);
    assert!(took < Span::from_ms(20), "{took}");
    assert_eq!(world.device.script().notified, Some(2));
    world.run(Span::from_ms(20));
    assert_eq!(world.pairs[0].1[0].status, IoStatus::ABORTED_BY_HOST);
    let parked = world.told().into_iter().find_map(|event| match event {
        Event::AdminCompleted(answer) => Some(answer.status),
        _ => None,
    });
    assert_eq!(parked, Some(IoStatus::ABORTED_BY_HOST));
}

/// In time is clean, late is not, and both end soon.
#[test]
fn a_shutdown_is_waited_for_as_long_as_allowed_and_no_longer() {
    for (lag_ms, rtd3e_ms) in [(490, 0), (510, 0), (700, 800), (900, 800)] {
        let mut world = World::ready_with(options(), |script| {
            script.shutdown_lag = Span::from_ms(lag_ms);
            script.identity.push((88, (rtd3e_ms * 1000_u32).to_le_bytes().to_vec()));
        });
        world.controller.shut_down(world.now, ShutdownNotification::Normal).unwrap();
        let took = end(&mut world);
        let allowed = u64::from(rtd3e_ms).max(500);
        let is_clean = lag_ms <= allowed;
        assert_eq!(world.told().pop(), Some(Event::ShutDown { is_clean }), "{lag_ms}");
        assert!(took < Span::from_ms(allowed + 20), "{took}");
        assert!(!world.device.script().is_enabled());
    }
}

#[test]
fn a_controller_known_to_say_nothing_is_believed_to_have_shut_down() {
    let quirks = Quirks { shutdown_never_completes: true, ..Quirks::default() };
    let asked = ControllerOptions { quirks, ..options() };
    let mut world = World::ready_with(asked, |script| script.shutdown_lag = Span::from_secs(1_000));
    world.controller.shut_down(world.now, ShutdownNotification::Normal).unwrap();
    end(&mut world);
    assert_eq!(world.told().pop(), Some(Event::ShutDown { is_clean: true }));
}

#[test]
fn a_controller_that_will_not_be_switched_off_is_cut_off() {
    let mut world = World::with_pairs(1);
    world.device.script().disable_lag = Span::from_secs(1_000);
    world.controller.shut_down(world.now, ShutdownNotification::Normal).unwrap();
    end(&mut world);
    assert_eq!(world.told().pop(), Some(Event::ShutDown { is_clean: false }));
    assert!(world.memory.is_cut_off());
}

#[test]
fn queues_that_will_not_be_deleted_do_not_hold_up_a_shutdown() {
    let mut world = World::with_pairs(2);
    world.device.script().mute.extend([0x00, 0x08]);
    world.controller.shut_down(world.now, ShutdownNotification::Normal).unwrap();
    let took = end(&mut world);
    assert!(took < Span::from_ms(600), "{took}");
    assert_eq!(world.told().pop(), Some(Event::ShutDown { is_clean: true }));
}

#[test]
fn a_queue_pair_that_nobody_polls_does_not_hold_up_a_shutdown() {
    let mut world = World::with_pairs(1);
    world.polls_pairs = false;
    world.controller.shut_down(world.now, ShutdownNotification::Normal).unwrap();
    let took = end(&mut world);
    assert!(took < Span::from_ms(100), "{took}");
}

#[test]
fn a_shutdown_begun_while_queues_are_being_made_ends_all_the_same() {
    for moments in 0..30 {
        let mut world = World::ready();
        let wanted = crate::QueuePairOptions {
            depth: 4,
            vector: None,
            techniques: crate::FastPathOptions::default(),
        };
        for _ in 0..3 {
            world.controller.create_queue_pair(world.now, wanted).unwrap();
        }
        for _ in 0..moments {
            world.step(tenmil_base::Instant::NEVER);
        }
        world.controller.shut_down(world.now, ShutdownNotification::Normal).unwrap();
        let took = end(&mut world);
        assert!(took < Span::from_ms(100), "{moments}: {took}");
        assert_eq!(world.told().pop(), Some(Event::ShutDown { is_clean: true }));
    }
}

#[test]
fn nothing_can_be_asked_of_a_controller_that_ends() {
    let mut world = World::ready();
    world.controller.shut_down(world.now, ShutdownNotification::Normal).unwrap();
    let now = world.now;
    let again = world.controller.shut_down(now, ShutdownNotification::Normal);
    assert_eq!(again, Err(RequestError::NotReady));
    assert_eq!(world.controller.reset(now), Err(RequestError::NotReady));
    assert_eq!(world.controller.delete_queue_pair(now, 1), Err(RequestError::NotReady));
}

/// Unplugs the device at each register read of its idle phase and of its shutdown.
#[test]
fn vanishing_at_any_later_read_is_removal() {
    for later in 1.. {
        let mut world = World::with_pairs(1);
        world.device.script().answers_io = false;
        world.submit_io(0, 7);
        world.controller.shut_down(world.now, ShutdownNotification::Normal).unwrap();
        {
            let mut script = world.device.script();
            script.gone_at_read = script.reads + later;
        }
        end(&mut world);
        world.run(Span::from_ms(20));
        assert_eq!(world.pairs[0].1.len(), 1, "answered once");
        if world.controller.state() == State::ShutDown {
            assert!(later > 6, "{later}");
            break;
        }
        world.assert_state(State::Removed);
        world.assert_order(0, QueueState::Dead);
        assert!(world.memory.is_cut_off());
    }
}

#[test]
fn an_idle_controller_that_is_unplugged_is_noticed() {
    let mut world = World::ready();
    world.run(Span::from_secs(1));
    world.device.script().gone_at_read = 0;
    let took = world.run_until(|event| *event == Event::Removed);
    assert!(took <= Span::from_ms(101), "{took}");
}

#[test]
fn a_controller_that_is_dropped_is_cut_off_and_gives_its_memory_back() {
    let world = World::with_pairs(2);
    let World { controller, memory, mut pairs, now, .. } = world;
    drop(controller);
    assert!(memory.is_cut_off());
    assert!(memory.allocations() > 0, "two owners have not noticed yet");
    let mut completions = tenmil_base::CompletionBatch::with_capacity(4);
    for (pair, _) in &mut pairs {
        pair.poll(now, &mut completions);
        assert_eq!(pair.state(), QueueState::Dead);
    }

    let world = World::ready();
    let World { controller, memory, .. } = world;
    drop(controller);
    assert_eq!(memory.allocations(), 0);
}

#[test]
fn a_controller_that_is_dropped_with_something_under_way_keeps_all_its_memory() {
    let World { controller, memory, mut pairs, now, .. } = World::with_pairs(1);
    let allocations = memory.allocations();
    memory.set_under_way(true);
    drop(controller);
    let mut completions = tenmil_base::CompletionBatch::with_capacity(4);
    pairs[0].0.poll(now, &mut completions);
    assert_eq!(pairs[0].0.state(), QueueState::Frozen);
    drop(pairs);
    assert_eq!(memory.allocations(), allocations);
}

#[test]
fn a_controller_that_was_given_up_can_be_taken_over_by_a_new_driver() {
    let World { controller, memory, device, now, .. } = World::ready();
    drop(controller);
    assert!(memory.is_cut_off());
    let controller = Controller::new(device.clone(), memory.clone(), options()).unwrap();
    let (events, pairs) = (Vec::new(), Vec::new());
    let mut world = World { now, device, memory, controller, events, pairs, polls_pairs: true };
    world.run_until(|event| *event == Event::Ready);
    assert!(!world.memory.is_cut_off());
    assert_eq!(world.device.script().faults, [], "reconnected only once it was disabled");
}
