//! Commands without a completion: aborted, parked by a reset, completed once, and finally failed.

use tenmil_base::{Instant, IoStatus, Span};
use tenmil_wire::{Command, Status};

use super::{World, options};
use crate::bringup::BringupError;
use crate::queue_link::{QueueState, ResetReason};
use crate::{
    ControllerError, ControllerOptions, Event, InvalidCompletion, RequestError, ResetCause, State,
};

fn answered(world: &World, pair: usize) -> Vec<(u64, IoStatus)> {
    world.pairs[pair].1.iter().map(|answer| (answer.token, answer.status)).collect()
}

fn admin_answers(world: &World) -> Vec<(u64, IoStatus)> {
    let told = world.events.iter().filter_map(|(_, event)| match event {
        Event::AdminCompleted(answer) => Some((answer.token, answer.status)),
        _ => None,
    });
    told.collect()
}

fn resets(world: &World) -> usize {
    world.told().iter().filter(|event| matches!(event, Event::ResetStarted { .. })).count()
}

#[test]
fn an_overdue_io_command_is_aborted_and_nothing_else_happens() {
    let mut world = World::with_pairs(1);
    world.device.script().answers_io = false;
    world.submit_io(0, 7);
    let took = world.run_until(|event| matches!(event, Event::CommandOverdue { queue: 1, .. }));
    assert!(took >= Span::from_ms(100) && took < Span::from_ms(140), "{took}");
    world.run(Span::from_ms(50));
    assert_eq!(answered(&world, 0), [(7, IoStatus(Status::ABORT_REQUESTED.0))]);
    world.device.script().answers_io = true;
    world.submit_io(0, 8);
    world.run(Span::from_secs(1));
    assert_eq!(answered(&world, 0)[1], (8, IoStatus::SUCCESS));
    assert_eq!(resets(&world), 0);
}

#[test]
fn a_command_that_cannot_be_aborted_costs_a_reset_after_which_everything_works() {
    let mut world = World::with_pairs(2);
    {
        let mut script = world.device.script();
        script.answers_io = false;
        script.aborts_fail = true;
    }
    world.submit_io(0, 7);
    world.submit_io(1, 8);
    world.run_until(|event| matches!(event, Event::ResetStarted { .. }));
    world.assert_state(State::Resetting);
    assert_eq!(answered(&world, 0), [], "parked until the controller has let go");
    world.device.script().answers_io = true;
    world.run_until(|event| *event == Event::Recovered);
    world.run(Span::from_ms(50));
    for id in [1, 2] {
        assert!(world.told().contains(&Event::QueuePairResumed { id }));
    }
    assert_eq!(answered(&world, 0), [(7, IoStatus::ABORTED_BY_HOST)]);
    assert_eq!(answered(&world, 1), [(8, IoStatus::ABORTED_BY_HOST)]);
    world.submit_io(0, 9);
    world.submit_io(1, 10);
    world.run(Span::from_ms(50));
    assert_eq!(answered(&world, 0)[1], (9, IoStatus::SUCCESS));
    assert_eq!(answered(&world, 1)[1], (10, IoStatus::SUCCESS));
    assert_eq!((resets(&world), world.device.script().resets), (1, 1));
    assert_eq!(world.device.script().faults, []);
}

#[test]
fn an_overdue_admin_command_is_aborted_then_reset_then_recovered() {
    let mut world = World::with_pairs(1);
    world.device.script().mute.insert(0x0a);
    world.submit_admin(5, 0x0a);
    world.run_until(|event| matches!(event, Event::CommandOverdue { queue: 0, .. }));
    assert_eq!(admin_answers(&world), []);
    world.run_until(|event| matches!(event, Event::ResetStarted { .. }));
    assert_eq!(admin_answers(&world), [], "not before the controller has let go");
    world.run_until(|event| *event == Event::Recovered);
    assert_eq!(admin_answers(&world), [(5, IoStatus::ABORTED_BY_HOST)]);
    world.submit_admin(6, 0x0a);
    world.run(Span::from_ms(50));
    assert_eq!(admin_answers(&world)[1], (6, IoStatus::SUCCESS));
}

#[test]
fn an_abort_that_is_not_answered_costs_a_reset() {
    let mut world = World::with_pairs(1);
    {
        let mut script = world.device.script();
        script.answers_io = false;
        script.mute.insert(0x08);
    }
    world.submit_io(0, 7);
    world.run_until(|event| matches!(event, Event::ResetStarted { .. }));
    let Some(Event::ResetStarted { cause }) = world.told().pop() else { panic!() };
    let stuck =
        matches!(cause, ResetCause::Queue { id: 1, reason: ResetReason::CommandTimeout { .. } });
    assert!(stuck || matches!(cause, ResetCause::AbortTimeout { queue: 1, .. }), "{cause}");
}

#[test]
fn aborts_keep_to_the_limit_of_the_controller() {
    for (acl, most) in [(0, 1), (1, 2), (3, 4), (200, 4)] {
        let mut world = World::ready_with(options(), |script| {
            script.identity.push((258, vec![acl]));
            script.answers_io = false;
            script.aborts_fail = true;
            script.mute.insert(0x08);
        });
        world.create(None);
        for token in 0..10 {
            world.submit_io(0, token);
        }
        let before = world.device.script().fetched.len();
        world.run_until(|event| matches!(event, Event::ResetStarted { .. }));
        let fetched = world.device.script().fetched[before..].to_vec();
        let aborts = fetched.iter().filter(|(opcode, _)| *opcode == 8).count();
        assert_eq!(aborts, most, "ACL {acl}");
    }
}

/// Commands that completed while their abort was in flight do not keep their slots, and the owner may use
/// all slots for owners: the driver's own commands still have slots.
#[test]
fn an_event_finds_room_beside_as_many_commands_as_there_may_be() {
    let asked = ControllerOptions { event_requests: 8, ..options() };
    let mut world = World::ready_with(asked, |script| {
        script.identity.extend([(258, vec![3]), (259, vec![7])]);
        script.mute.extend([0x08, 0x0a]);
    });
    world.run(Span::from_ms(20));
    let fill = |world: &mut World, count: usize| {
        let command = || Command::new(0x0a);
        let now = world.now;
        (0..count)
            .take_while(|_| world.controller.submit_admin(now, 1, command(), None).is_ok())
            .count()
    };
    assert_eq!(fill(&mut world, 4), 4);
    world.run(Span::from_ms(100));
    let others = fill(&mut world, usize::MAX);
    assert!(others > 20, "{others} are no load");
    world.run(Span::from_ms(110));
    let overdue: Vec<u16> = world.told().iter().filter_map(overdue_admin_command).collect();
    assert_eq!(overdue.len(), 4);
    for cid in overdue {
        world.device.script().answer(0, cid, Status::SUCCESS, 0);
    }
    world.run(Span::from_ms(5));
    assert_eq!(fill(&mut world, usize::MAX), 4, "as many as were answered");
    {
        let mut script = world.device.script();
        script.critical_warning = 1;
        script.raise(1, 2, 2);
    }
    world.run(Span::from_ms(5));
    assert!(world.told().iter().any(|event| matches!(event, Event::Health(_))));
}

fn overdue_admin_command(event: &Event) -> Option<u16> {
    match event {
        Event::CommandOverdue { queue: 0, cid } => Some(*cid),
        _ => None,
    }
}

#[test]
fn a_controller_that_needs_too_many_resets_is_dead_and_everything_is_answered() {
    let mut world = World::with_pairs(1);
    {
        let mut script = world.device.script();
        script.mute.extend([0x06, 0x08]);
        script.mute_for_ever = true;
        script.answers_io = false;
    }
    world.submit_io(0, 7);
    world.controller.reset(world.now).unwrap();
    world.run_until(|event| matches!(event, Event::Dead(_)));
    let Some(Event::Dead(ControllerError::TooManyResets { resets: 4, .. })) = world.told().pop()
    else {
        panic!("{:?}", world.told())
    };
    assert_eq!(resets(&world), 5, "four were tried, and the fifth was too many");
    world.run(Span::from_ms(20));
    world.assert_state(State::Dead);
    world.assert_order(0, QueueState::Dead);
    assert_eq!(answered(&world, 0), [(7, IoStatus::ABORTED_BY_HOST)]);
    assert!(world.memory.is_cut_off());
    assert_eq!(world.controller.wake_at(), Instant::NEVER);
    assert_eq!(world.controller.reset(world.now), Err(RequestError::NotReady));
}

#[test]
fn resets_long_ago_are_forgiven() {
    let forgiving =
        ControllerOptions { resets_max: 2, resets_within: Span::from_secs(1), ..options() };
    let mut world = World::ready_with(forgiving, |_| {});
    for _ in 0..6 {
        world.controller.reset(world.now).unwrap();
        world.run_until(|event| *event == Event::Recovered);
        world.run(Span::from_ms(600));
    }
    world.assert_state(State::Ready);
}

/// The controller cannot be disabled: its DMA is revoked, and only then anything is completed.
#[test]
fn a_controller_that_cannot_be_disabled_is_cut_off_before_anything_is_answered() {
    let mut world = World::with_pairs(1);
    {
        let mut script = world.device.script();
        script.answers_io = false;
        script.disable_lag = Span::from_secs(1_000);
    }
    world.submit_io(0, 7);
    world.submit_admin(5, 0x0a);
    world.device.script().mute.insert(0x0a);
    world.controller.reset(world.now).unwrap();
    while !world.memory.is_cut_off() {
        world.step(Instant::NEVER);
        if !world.memory.is_cut_off() {
            assert_eq!((answered(&world, 0), admin_answers(&world)), (vec![], vec![]));
        }
    }
    assert!(world.now < Instant { ns: 700_000_000 }, "{:?}", world.now);
    world.run(Span::from_ms(20));
    assert_eq!(answered(&world, 0), [(7, IoStatus::ABORTED_BY_HOST)]);
    assert_eq!(admin_answers(&world), [(5, IoStatus::ABORTED_BY_HOST)]);
    world.run_until(|event| matches!(event, Event::Dead(_)));
    let Some(Event::Dead(ControllerError::TooManyResets { cause, .. })) = world.told().pop() else {
        panic!("{:?}", world.told())
    };
    assert!(matches!(cause, ResetCause::Bringup(BringupError::Timeout { want_ready: false, .. })));
    assert!(world.memory.cut_offs() > 0 && world.memory.is_cut_off());
}

/// Accesses in progress when DMA is revoked are waited for, and nothing is completed before.
#[test]
fn what_is_under_way_when_a_controller_is_cut_off_is_waited_for() {
    let mut world = World::with_pairs(1);
    {
        let mut script = world.device.script();
        script.answers_io = false;
        script.disable_lag = Span::from_ms(700);
    }
    world.submit_io(0, 7);
    world.memory.set_under_way(true);
    world.controller.reset(world.now).unwrap();
    while !world.memory.is_cut_off() {
        world.step(Instant::NEVER);
    }
    world.run(Span::from_ms(100));
    world.assert_state(State::Resetting);
    assert_eq!(answered(&world, 0), vec![]);
    world.memory.set_under_way(false);
    world.run(Span::from_ms(10));
    assert_eq!(answered(&world, 0), [(7, IoStatus::ABORTED_BY_HOST)]);
    world.run_until(|event| *event == Event::Recovered);
}

/// They do not end in time: the owner is informed, and the buffers remain allocated.
#[test]
fn what_stays_under_way_keeps_its_buffers_after_the_controller_is_given_up() {
    for is_removed in [false, true] {
        let mut world = World::with_pairs(1);
        {
            let mut script = world.device.script();
            script.answers_io = false;
            script.disable_lag = Span::from_secs(1_000);
        }
        world.submit_io(0, 7);
        world.memory.set_under_way(true);
        world.run(Span::from_ms(1));
        match is_removed {
            true => world.device.script().gone_at_read = 0,
            false => world.controller.reset(world.now).unwrap(),
        }
        let allocations = world.memory.allocations();
        world.run_until(|event| matches!(event, Event::Dead(_) | Event::Removed));
        let told = world.told().pop();
        match is_removed {
            true => assert_eq!(told, Some(Event::Removed)),
            false => {
                let died = matches!(told, Some(Event::Dead(ControllerError::DmaActive { .. })));
                assert!(died, "{told:?}");
            }
        }
        world.run(Span::from_secs(10));
        assert_eq!(answered(&world, 0), vec![]);
        assert_eq!(world.memory.allocations(), allocations);
        world.assert_state(if is_removed { State::Removed } else { State::Dead });
        world.memory.set_under_way(false);
        world.run(Span::from_secs(1));
        assert_eq!(answered(&world, 0).len(), 1, "in the end");
        world.assert_order(0, QueueState::Dead);
        assert_eq!(world.controller.wake_at(), Instant::NEVER);
    }
}

/// They end late, within a further reset: the controller is reconnected and works again.
#[test]
fn a_controller_that_lets_go_late_gets_its_memory_back_when_it_has() {
    let mut world = World::with_pairs(1);
    world.device.script().disable_lag = Span::from_ms(700);
    world.submit_io(0, 7);
    world.run(Span::from_ms(5));
    world.controller.reset(world.now).unwrap();
    world.run_until(|event| *event == Event::Recovered);
    assert_eq!(world.memory.cut_offs(), 1);
    assert!(!world.memory.is_cut_off());
    world.run(Span::from_ms(20));
    world.submit_io(0, 8);
    world.run(Span::from_ms(20));
    assert_eq!(answered(&world, 0).last(), Some(&(8, IoStatus::SUCCESS)));
    assert_eq!(world.device.script().faults, []);
}

/// Sweeps the duration of a disable around its deadline: on both sides, every command completes once.
#[test]
fn every_command_is_answered_exactly_once_whatever_the_lag() {
    for lag_ms in (470..=530).step_by(10) {
        let mut world = World::with_pairs(1);
        {
            let mut script = world.device.script();
            script.disable_lag = Span::from_ms(lag_ms);
            script.answers_io = false;
        }
        for token in 0..10 {
            world.submit_io(0, token);
        }
        world.run(Span::from_ms(1));
        world.controller.reset(world.now).unwrap();
        world.run_until(|event| *event == Event::Recovered);
        world.run(Span::from_ms(50));
        let mut tokens: Vec<u64> = answered(&world, 0).iter().map(|(token, _)| *token).collect();
        tokens.sort_unstable();
        assert!(tokens.into_iter().eq(0..10), "lag {lag_ms}");
        assert_eq!(world.memory.cut_offs(), u32::from(lag_ms > 500), "lag {lag_ms}");
    }
}

#[test]
fn a_queue_pair_that_nobody_polls_does_not_hold_up_the_others() {
    let mut world = World::with_pairs(2);
    let sleeper = world.pairs.remove(0);
    world.controller.reset(world.now).unwrap();
    world.run_until(|event| *event == Event::QueuePairResumed { id: 2 });
    world.submit_io(0, 1);
    world.run(Span::from_ms(20));
    assert_eq!(answered(&world, 0), [(1, IoStatus::SUCCESS)]);
    assert!(!world.device.script().has_queue(1));
    world.pairs.push(sleeper);
    world.run_until(|event| *event == Event::QueuePairResumed { id: 1 });
    world.submit_io(1, 2);
    world.run(Span::from_ms(20));
    assert_eq!(answered(&world, 1), [(2, IoStatus::SUCCESS)]);
}

#[test]
fn a_queue_that_is_not_granted_again_answers_and_refuses_for_good() {
    let mut world = World::with_pairs(1);
    world.controller.reset(world.now).unwrap();
    world.device.script().refuse.insert(0x05, Status::INVALID_QUEUE_IDENTIFIER);
    let status = Status::INVALID_QUEUE_IDENTIFIER;
    world.run_until(|event| *event == Event::QueuePairRefused { id: 1, status });
    world.run(Span::from_ms(20));
    world.assert_order(0, QueueState::Dead);
    world.assert_state(State::Ready);
}

#[test]
fn a_completion_that_cannot_be_costs_a_reset() {
    for queue in [0, 1] {
        let mut world = World::with_pairs(1);
        world.device.script().post_nonsense(queue, 0x3f);
        world.run_until(|event| matches!(event, Event::ResetStarted { .. }));
        let Some(Event::ResetStarted { cause }) = world.told().pop() else { panic!() };
        match cause {
            ResetCause::Queue { id, reason: ResetReason::InvalidCompletion(nonsense) } => {
                assert_eq!(id, queue);
                let known = matches!(
                    nonsense,
                    InvalidCompletion::NotInFlight { cid: 0x3f }
                        | InvalidCompletion::UnknownIdentifier { cid: 0x3f }
                );
                assert!(known, "{nonsense:?}");
            }
            other => panic!("{other}"),
        }
        world.run_until(|event| *event == Event::Recovered);
    }
}

#[test]
fn a_fatal_status_and_a_lost_readiness_are_seen_without_any_command() {
    let mut world = World::ready();
    world.device.script().fatal = true;
    let took = world.run_until(|event| matches!(event, Event::ResetStarted { .. }));
    assert!(took <= Span::from_ms(101), "{took}");
    assert_eq!(world.told(), [Event::ResetStarted { cause: ResetCause::Fatal { csts: 3 } }]);
    world.run_until(|event| *event == Event::Recovered);

    world.device.script().lose_readiness();
    world.run_until(|event| {
        matches!(event, Event::ResetStarted { cause: ResetCause::NotReady { .. } })
    });
    world.run_until(|event| *event == Event::Recovered);
    world.assert_state(State::Ready);
}

#[test]
fn another_controller_in_its_place_is_not_taken_for_it() {
    let mut world = World::ready();
    world.device.script().identity.push((4, b"SERIAL-2".to_vec()));
    world.controller.reset(world.now).unwrap();
    world.run_until(|event| matches!(event, Event::Dead(_)));
    let Some(Event::Dead(error)) = world.told().pop() else { panic!() };
    assert!(error.to_string().contains("SN, MN"), "{error}");
}

#[test]
fn another_namespace_under_the_same_identifier_is_not_used() {
    let mut world = World::with_pairs(1);
    world.controller.expect_namespace(1);
    world.device.script().disk = 7;
    world.controller.reset(world.now).unwrap();
    world.run_until(|event| matches!(event, Event::Dead(_)));
    let told = world.told();
    let resumed = |event: &Event| matches!(event, Event::QueuePairResumed { .. });
    assert!(!told.iter().any(resumed), "{told:?}");
    let Some(Event::Dead(error)) = told.last() else { panic!("{told:?}") };
    let expected = "UUID, NGUID, EUI64 of namespace is 0x1, expected those that it had before";
    assert!(error.to_string().contains(expected), "{error}");
    // A controller that reappears is used again.
    let mut world = World::with_pairs(1);
    world.controller.expect_namespace(1);
    world.device.script().disk = 7;
    world.controller.reset(world.now).unwrap();
    world.run_until(|event| {
        matches!(event, Event::ResetStarted { cause: ResetCause::InvalidData(_) })
    });
    world.device.script().disk = 0;
    world.run_until(|event| matches!(event, Event::QueuePairResumed { .. }));
}

#[test]
fn namespaces_that_changed_during_a_reset_are_told() {
    let mut world = World::ready();
    world.controller.reset(world.now).unwrap();
    world.device.script().namespaces.remove(&1);
    world.run_until(|event| *event == Event::Recovered);
    let told = world.told();
    assert_eq!(
        told,
        [
            Event::ResetStarted { cause: ResetCause::Requested },
            Event::NamespaceDetached { id: 1 },
            Event::Recovered
        ]
    );
}

#[test]
fn a_subsystem_reset_is_written_once_and_recovered_from() {
    let mut world = World::with_pairs(1);
    world.submit_io(0, 3);
    world.controller.reset_subsystem(world.now).unwrap();
    world.run_until(|event| *event == Event::Recovered);
    world.run(Span::from_ms(20));
    assert_eq!(world.device.script().subsystem_resets, 1);
    assert_eq!(answered(&world, 0), [(3, IoStatus::ABORTED_BY_HOST)]);
    let mut without = World::ready_with(options(), |script| script.cap &= !(1 << 36));
    let refused = without.controller.reset_subsystem(without.now);
    assert!(matches!(refused, Err(RequestError::Unsupported { .. })));
    without.assert_state(State::Ready);
}

/// Unplugs the device at each register read of a reset.
#[test]
fn vanishing_at_any_read_of_a_reset_answers_everything_once() {
    for later in 1.. {
        let mut world = World::with_pairs(1);
        world.device.script().answers_io = false;
        world.submit_io(0, 7);
        world.submit_admin(5, 0x0a);
        world.run(Span::from_us(50));
        world.controller.reset(world.now).unwrap();
        {
            let mut script = world.device.script();
            script.gone_at_read = script.reads + later;
        }
        world.run_until(|event| matches!(event, Event::Removed | Event::Recovered));
        world.run(Span::from_ms(20));
        assert_eq!(answered(&world, 0), [(7, IoStatus::ABORTED_BY_HOST)]);
        assert_eq!(admin_answers(&world).len(), 1, "{:?}", world.told());
        if world.controller.state() == State::Ready {
            assert!(later > 6, "{later}");
            break;
        }
        world.assert_order(0, QueueState::Dead);
        assert!(world.memory.is_cut_off());
    }
}

fn losses(world: &World) -> Vec<bool> {
    world.pairs.iter().map(|(pair, _)| pair.has_lost_writes()).collect()
}

#[test]
fn controller_that_fails_by_itself_has_every_queue_report_lost_writes() {
    let failures: [fn(&mut World); 3] = [
        |world| world.device.script().fatal = true,
        |world| world.device.script().lose_readiness(),
        |world| world.controller.reset_subsystem(world.now).unwrap(),
    ];
    for (number, fail) in failures.into_iter().enumerate() {
        let mut world = World::with_pairs(2);
        assert_eq!(losses(&world), [false, false]);
        fail(&mut world);
        world.run_until(|event| *event == Event::Recovered);
        world.run(Span::from_ms(50));
        assert_eq!(losses(&world), [true, true], "failure {number}");
        world.create(None);
        assert_eq!(losses(&world), [true; 3], "no queue has reported the loss: failure {number}");
        world.pairs[1].0.report_lost_writes();
        world.create(None);
        assert_eq!(losses(&world), [true, false, true, false], "failure {number}");
    }
}

#[test]
fn reset_by_the_host_loses_no_writes() {
    let mut world = World::with_pairs(2);
    world.controller.reset(world.now).unwrap();
    world.run_until(|event| *event == Event::Recovered);
    world.run(Span::from_ms(50));
    world.device.script().answers_io = false;
    world.device.script().aborts_fail = true;
    world.submit_io(0, 7);
    world.run_until(|event| matches!(event, Event::ResetStarted { .. }));
    world.device.script().answers_io = true;
    world.run_until(|event| *event == Event::Recovered);
    world.create(None);
    assert_eq!((losses(&world), resets(&world)), (vec![false; 3], 2));
}

#[test]
fn failure_that_shows_as_an_overdue_command_has_queues_report_lost_writes() {
    let seldom = ControllerOptions { status_interval: Span::from_secs(60), ..options() };
    let mut world = World::ready_with(seldom, |_| {});
    world.create(None);
    {
        let mut script = world.device.script();
        (script.answers_io, script.aborts_fail, script.fatal) = (false, true, true);
    }
    world.submit_io(0, 7);
    world.run_until(|event| {
        matches!(event, Event::ResetStarted { cause: ResetCause::Queue { .. } })
    });
    world.run_until(|event| *event == Event::Recovered);
    assert_eq!(losses(&world), [true]);
}

#[test]
fn owner_that_counts_losses_is_told_of_none_by_the_end_of_a_connection() {
    let counts = ControllerOptions { owner_counts_losses: true, ..options() };
    let mut world = World::ready_with(counts, |_| {});
    world.create(None);
    world.device.script().fatal = true;
    world.run_until(|event| *event == Event::Recovered);
    world.run(Span::from_ms(50));
    assert_eq!(losses(&world), [false]);
}
