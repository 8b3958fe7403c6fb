//! Commands without a completion: aborted, parked by a reset, completed once, and finally failed.

use tenmil_base::{Instant, IoStatus, Span};
use tenmil_wire::{Command, Status};

use super::{ControllerHarness, short_timeout_options};
use crate::bringup::BringupError;
use crate::queue_link::{QueueState, ResetReason};
use crate::{
    ControllerError, ControllerOptions, ControllerState, Event, InvalidCompletion, RequestError,
    ResetCause,
};

fn io_completions(harness: &ControllerHarness, pair: usize) -> Vec<(u64, IoStatus)> {
    harness.pairs[pair].1.iter().map(|answer| (answer.token, answer.status)).collect()
}

fn admin_completions(harness: &ControllerHarness) -> Vec<(u64, IoStatus)> {
    let reported_values = harness.events.iter().filter_map(|(_, event)| match event {
        Event::AdminCompleted(answer) => Some((answer.token, answer.status)),
        _ => None,
    });
    reported_values.collect()
}

fn reset_count(harness: &ControllerHarness) -> usize {
    harness
        .events_without_times()
        .iter()
        .filter(|event| matches!(event, Event::ResetStarted { .. }))
        .count()
}

#[test]
fn overdue_io_command_is_only_aborted() {
    let mut harness = ControllerHarness::with_pairs(1);
    harness.device.state().answers_io = false;
    harness.submit_io(0, 7);
    let took = harness.run_until(|event| matches!(event, Event::CommandOverdue { queue: 1, .. }));
    assert!(took >= Span::from_ms(100) && took < Span::from_ms(140), "{took}");
    harness.run_for(Span::from_ms(50));
    assert_eq!(io_completions(&harness, 0), [(7, IoStatus(Status::ABORT_REQUESTED.0))]);
    harness.device.state().answers_io = true;
    harness.submit_io(0, 8);
    harness.run_for(Span::from_secs(1));
    assert_eq!(io_completions(&harness, 0)[1], (8, IoStatus::SUCCESS));
    assert_eq!(reset_count(&harness), 0);
}

#[test]
fn command_that_cannot_be_aborted_causes_a_reset_that_recovers() {
    let mut harness = ControllerHarness::with_pairs(2);
    {
        let mut state = harness.device.state();
        state.answers_io = false;
        state.aborts_fail = true;
    }
    harness.submit_io(0, 7);
    harness.submit_io(1, 8);
    harness.run_until(|event| matches!(event, Event::ResetStarted { .. }));
    harness.assert_state(ControllerState::Resetting);
    assert_eq!(io_completions(&harness, 0), [], "parked until the controller has let go");
    harness.device.state().answers_io = true;
    harness.run_until(|event| *event == Event::Recovered);
    harness.run_for(Span::from_ms(50));
    for id in [1, 2] {
        assert!(harness.events_without_times().contains(&Event::QueuePairResumed { id }));
    }
    assert_eq!(io_completions(&harness, 0), [(7, IoStatus::ABORTED_BY_HOST)]);
    assert_eq!(io_completions(&harness, 1), [(8, IoStatus::ABORTED_BY_HOST)]);
    harness.submit_io(0, 9);
    harness.submit_io(1, 10);
    harness.run_for(Span::from_ms(50));
    assert_eq!(io_completions(&harness, 0)[1], (9, IoStatus::SUCCESS));
    assert_eq!(io_completions(&harness, 1)[1], (10, IoStatus::SUCCESS));
    assert_eq!((reset_count(&harness), harness.device.state().resets), (1, 1));
    assert_eq!(harness.device.state().faults, []);
}

#[test]
fn an_overdue_admin_command_is_aborted_then_reset_then_recovered() {
    let mut harness = ControllerHarness::with_pairs(1);
    harness.device.state().unanswered_opcodes.insert(0x0a);
    harness.submit_admin(5, 0x0a);
    harness.run_until(|event| matches!(event, Event::CommandOverdue { queue: 0, .. }));
    assert_eq!(admin_completions(&harness), []);
    harness.run_until(|event| matches!(event, Event::ResetStarted { .. }));
    assert_eq!(admin_completions(&harness), [], "not before the controller has let go");
    harness.run_until(|event| *event == Event::Recovered);
    assert_eq!(admin_completions(&harness), [(5, IoStatus::ABORTED_BY_HOST)]);
    harness.submit_admin(6, 0x0a);
    harness.run_for(Span::from_ms(50));
    assert_eq!(admin_completions(&harness)[1], (6, IoStatus::SUCCESS));
}

#[test]
fn abort_without_completion_causes_a_reset() {
    let mut harness = ControllerHarness::with_pairs(1);
    {
        let mut state = harness.device.state();
        state.answers_io = false;
        state.unanswered_opcodes.insert(0x08);
    }
    harness.submit_io(0, 7);
    harness.run_until(|event| matches!(event, Event::ResetStarted { .. }));
    let Some(Event::ResetStarted { cause }) = harness.events_without_times().pop() else {
        panic!()
    };
    let stuck =
        matches!(cause, ResetCause::Queue { id: 1, reason: ResetReason::CommandTimeout { .. } });
    assert!(stuck || matches!(cause, ResetCause::AbortTimeout { queue: 1, .. }), "{cause}");
}

#[test]
fn aborts_respect_acl() {
    for (acl, most) in [(0, 1), (1, 2), (3, 4), (200, 4)] {
        let mut harness = ControllerHarness::ready_with(short_timeout_options(), |state| {
            state.identity.push((258, vec![acl]));
            state.answers_io = false;
            state.aborts_fail = true;
            state.unanswered_opcodes.insert(0x08);
        });
        harness.create_queue_pair(None);
        for token in 0..10 {
            harness.submit_io(0, token);
        }
        let before = harness.device.state().fetched.len();
        harness.run_until(|event| matches!(event, Event::ResetStarted { .. }));
        let fetched = harness.device.state().fetched[before..].to_vec();
        let aborts = fetched.iter().filter(|(opcode, _)| *opcode == 8).count();
        assert_eq!(aborts, most, "ACL {acl}");
    }
}

/// Commands that completed while their abort was in flight do not keep their slots, and the owner may use
/// all slots for owners: the driver's own commands still have slots.
#[test]
fn event_log_page_command_has_a_slot_beside_all_owner_commands() {
    let asked = ControllerOptions { event_requests: 8, ..short_timeout_options() };
    let mut harness = ControllerHarness::ready_with(asked, |state| {
        state.identity.extend([(258, vec![3]), (259, vec![7])]);
        state.unanswered_opcodes.extend([0x08, 0x0a]);
    });
    harness.run_for(Span::from_ms(20));
    let fill = |harness: &mut ControllerHarness, count: usize| {
        let command = || Command::new(0x0a);
        let now = harness.now;
        (0..count)
            .take_while(|_| harness.controller.submit_admin(now, 1, command(), None).is_ok())
            .count()
    };
    assert_eq!(fill(&mut harness, 4), 4);
    harness.run_for(Span::from_ms(100));
    let others = fill(&mut harness, usize::MAX);
    assert!(others > 20, "{others} are no load");
    harness.run_for(Span::from_ms(110));
    let overdue: Vec<u16> =
        harness.events_without_times().iter().filter_map(overdue_admin_cid).collect();
    assert_eq!(overdue.len(), 4);
    for cid in overdue {
        harness.device.state().schedule_completion(0, cid, Status::SUCCESS, 0);
    }
    harness.run_for(Span::from_ms(5));
    assert_eq!(fill(&mut harness, usize::MAX), 4, "as many as were answered");
    {
        let mut state = harness.device.state();
        state.critical_warning = 1;
        state.raise_event(1, 2, 2);
    }
    harness.run_for(Span::from_ms(5));
    assert!(harness.events_without_times().iter().any(|event| matches!(event, Event::Health(_))));
}

fn overdue_admin_cid(event: &Event) -> Option<u16> {
    match event {
        Event::CommandOverdue { queue: 0, cid } => Some(*cid),
        _ => None,
    }
}

#[test]
fn controller_with_too_many_resets_is_dead_and_all_commands_complete() {
    let mut harness = ControllerHarness::with_pairs(1);
    {
        let mut state = harness.device.state();
        state.unanswered_opcodes.extend([0x06, 0x08]);
        state.keeps_muted_after_reset = true;
        state.answers_io = false;
    }
    harness.submit_io(0, 7);
    harness.controller.reset(harness.now).unwrap();
    harness.run_until(|event| matches!(event, Event::Dead(_)));
    let Some(Event::Dead(ControllerError::TooManyResets { resets: 4, .. })) =
        harness.events_without_times().pop()
    else {
        panic!("{:?}", harness.events_without_times())
    };
    assert_eq!(reset_count(&harness), 5, "four were tried, and the fifth was too many");
    harness.run_for(Span::from_ms(20));
    harness.assert_state(ControllerState::Dead);
    harness.assert_queue_state(0, QueueState::Dead);
    assert_eq!(io_completions(&harness, 0), [(7, IoStatus::ABORTED_BY_HOST)]);
    assert!(harness.memory.is_dma_revoked());
    assert_eq!(harness.controller.wake_at(), Instant::NEVER);
    assert_eq!(harness.controller.reset(harness.now), Err(RequestError::NotReady));
}

#[test]
fn resets_outside_the_window_do_not_count() {
    let forgiving = ControllerOptions {
        resets_max: 2,
        resets_within: Span::from_secs(1),
        ..short_timeout_options()
    };
    let mut harness = ControllerHarness::ready_with(forgiving, |_| {});
    for _ in 0..6 {
        harness.controller.reset(harness.now).unwrap();
        harness.run_until(|event| *event == Event::Recovered);
        harness.run_for(Span::from_ms(600));
    }
    harness.assert_state(ControllerState::Ready);
}

/// The controller cannot be disabled: its DMA is revoked, and only then anything is completed.
#[test]
fn dma_is_revoked_before_commands_of_an_undisabled_controller_complete() {
    let mut harness = ControllerHarness::with_pairs(1);
    {
        let mut state = harness.device.state();
        state.answers_io = false;
        state.disable_lag = Span::from_secs(1_000);
    }
    harness.submit_io(0, 7);
    harness.submit_admin(5, 0x0a);
    harness.device.state().unanswered_opcodes.insert(0x0a);
    harness.controller.reset(harness.now).unwrap();
    while !harness.memory.is_dma_revoked() {
        harness.step(Instant::NEVER);
        if !harness.memory.is_dma_revoked() {
            assert_eq!(
                (io_completions(&harness, 0), admin_completions(&harness)),
                (vec![], vec![])
            );
        }
    }
    assert!(harness.now < Instant { ns: 700_000_000 }, "{:?}", harness.now);
    harness.run_for(Span::from_ms(20));
    assert_eq!(io_completions(&harness, 0), [(7, IoStatus::ABORTED_BY_HOST)]);
    assert_eq!(admin_completions(&harness), [(5, IoStatus::ABORTED_BY_HOST)]);
    harness.run_until(|event| matches!(event, Event::Dead(_)));
    let Some(Event::Dead(ControllerError::TooManyResets { cause, .. })) =
        harness.events_without_times().pop()
    else {
        panic!("{:?}", harness.events_without_times())
    };
    assert!(matches!(cause, ResetCause::Bringup(BringupError::Timeout { want_ready: false, .. })));
    assert!(harness.memory.revocation_count() > 0 && harness.memory.is_dma_revoked());
}

/// Accesses in progress when DMA is revoked are waited for, and nothing is completed before.
#[test]
fn dma_in_flight_at_revocation_is_awaited() {
    let mut harness = ControllerHarness::with_pairs(1);
    {
        let mut state = harness.device.state();
        state.answers_io = false;
        state.disable_lag = Span::from_ms(700);
    }
    harness.submit_io(0, 7);
    harness.memory.set_dma_in_flight(true);
    harness.controller.reset(harness.now).unwrap();
    while !harness.memory.is_dma_revoked() {
        harness.step(Instant::NEVER);
    }
    harness.run_for(Span::from_ms(100));
    harness.assert_state(ControllerState::Resetting);
    assert_eq!(io_completions(&harness, 0), vec![]);
    harness.memory.set_dma_in_flight(false);
    harness.run_for(Span::from_ms(10));
    assert_eq!(io_completions(&harness, 0), [(7, IoStatus::ABORTED_BY_HOST)]);
    harness.run_until(|event| *event == Event::Recovered);
}

/// They do not end in time: the owner is informed, and the buffers remain allocated.
#[test]
fn dma_in_flight_keeps_its_buffers_after_the_controller_is_dead() {
    for is_removed in [false, true] {
        let mut harness = ControllerHarness::with_pairs(1);
        {
            let mut state = harness.device.state();
            state.answers_io = false;
            state.disable_lag = Span::from_secs(1_000);
        }
        harness.submit_io(0, 7);
        harness.memory.set_dma_in_flight(true);
        harness.run_for(Span::from_ms(1));
        match is_removed {
            true => harness.device.state().unplugged_at_read = 0,
            false => harness.controller.reset(harness.now).unwrap(),
        }
        let allocations = harness.memory.allocation_count();
        harness.run_until(|event| matches!(event, Event::Dead(_) | Event::Removed));
        let reported_values = harness.events_without_times().pop();
        match is_removed {
            true => assert_eq!(reported_values, Some(Event::Removed)),
            false => {
                let died =
                    matches!(reported_values, Some(Event::Dead(ControllerError::DmaActive { .. })));
                assert!(died, "{reported_values:?}");
            }
        }
        harness.run_for(Span::from_secs(10));
        assert_eq!(io_completions(&harness, 0), vec![]);
        assert_eq!(harness.memory.allocation_count(), allocations);
        harness.assert_state(if is_removed {
            ControllerState::Removed
        } else {
            ControllerState::Dead
        });
        harness.memory.set_dma_in_flight(false);
        harness.run_for(Span::from_secs(1));
        assert_eq!(io_completions(&harness, 0).len(), 1, "in the end");
        harness.assert_queue_state(0, QueueState::Dead);
        assert_eq!(harness.controller.wake_at(), Instant::NEVER);
    }
}

/// They end late, within a further reset: the controller is reconnected and works again.
#[test]
fn late_end_of_dma_releases_the_memory() {
    let mut harness = ControllerHarness::with_pairs(1);
    harness.device.state().disable_lag = Span::from_ms(700);
    harness.submit_io(0, 7);
    harness.run_for(Span::from_ms(5));
    harness.controller.reset(harness.now).unwrap();
    harness.run_until(|event| *event == Event::Recovered);
    assert_eq!(harness.memory.revocation_count(), 1);
    assert!(!harness.memory.is_dma_revoked());
    harness.run_for(Span::from_ms(20));
    harness.submit_io(0, 8);
    harness.run_for(Span::from_ms(20));
    assert_eq!(io_completions(&harness, 0).last(), Some(&(8, IoStatus::SUCCESS)));
    assert_eq!(harness.device.state().faults, []);
}

/// Sweeps the duration of a disable around its deadline: on both sides, every command completes once.
#[test]
fn every_command_completes_exactly_once_at_any_disable_delay() {
    for lag_ms in (470..=530).step_by(10) {
        let mut harness = ControllerHarness::with_pairs(1);
        {
            let mut state = harness.device.state();
            state.disable_lag = Span::from_ms(lag_ms);
            state.answers_io = false;
        }
        for token in 0..10 {
            harness.submit_io(0, token);
        }
        harness.run_for(Span::from_ms(1));
        harness.controller.reset(harness.now).unwrap();
        harness.run_until(|event| *event == Event::Recovered);
        harness.run_for(Span::from_ms(50));
        let mut tokens: Vec<u64> =
            io_completions(&harness, 0).iter().map(|(token, _)| *token).collect();
        tokens.sort_unstable();
        assert!(tokens.into_iter().eq(0..10), "lag {lag_ms}");
        assert_eq!(harness.memory.revocation_count(), u32::from(lag_ms > 500), "lag {lag_ms}");
    }
}

#[test]
fn unpolled_queue_pair_does_not_delay_others() {
    let mut harness = ControllerHarness::with_pairs(2);
    let sleeper = harness.pairs.remove(0);
    harness.controller.reset(harness.now).unwrap();
    harness.run_until(|event| *event == Event::QueuePairResumed { id: 2 });
    harness.submit_io(0, 1);
    harness.run_for(Span::from_ms(20));
    assert_eq!(io_completions(&harness, 0), [(1, IoStatus::SUCCESS)]);
    assert!(!harness.device.state().has_queue_pair(1));
    harness.pairs.push(sleeper);
    harness.run_until(|event| *event == Event::QueuePairResumed { id: 1 });
    harness.submit_io(1, 2);
    harness.run_for(Span::from_ms(20));
    assert_eq!(io_completions(&harness, 1), [(2, IoStatus::SUCCESS)]);
}

#[test]
fn queue_not_recreated_after_reset_completes_and_rejects_commands() {
    let mut harness = ControllerHarness::with_pairs(1);
    harness.controller.reset(harness.now).unwrap();
    harness.device.state().refuse.insert(0x05, Status::INVALID_QUEUE_IDENTIFIER);
    let status = Status::INVALID_QUEUE_IDENTIFIER;
    harness.run_until(|event| *event == Event::QueuePairRefused { id: 1, status });
    harness.run_for(Span::from_ms(20));
    harness.assert_queue_state(0, QueueState::Dead);
    harness.assert_state(ControllerState::Ready);
}

#[test]
fn invalid_completion_causes_a_reset() {
    for queue in [0, 1] {
        let mut harness = ControllerHarness::with_pairs(1);
        harness.device.state().post_invalid_completion(queue, 0x3f);
        harness.run_until(|event| matches!(event, Event::ResetStarted { .. }));
        let Some(Event::ResetStarted { cause }) = harness.events_without_times().pop() else {
            panic!()
        };
        match cause {
            ResetCause::Queue {
                id,
                reason: ResetReason::InvalidCompletion(invalid_completion),
            } => {
                assert_eq!(id, queue);
                let known = matches!(
                    invalid_completion,
                    InvalidCompletion::NotInFlight { cid: 0x3f }
                        | InvalidCompletion::UnknownIdentifier { cid: 0x3f }
                );
                assert!(known, "{invalid_completion:?}");
            }
            other => panic!("{other}"),
        }
        harness.run_until(|event| *event == Event::Recovered);
    }
}

#[test]
fn fatal_status_and_lost_readiness_are_detected_without_commands() {
    let mut harness = ControllerHarness::ready();
    harness.device.state().fatal = true;
    let took = harness.run_until(|event| matches!(event, Event::ResetStarted { .. }));
    assert!(took <= Span::from_ms(101), "{took}");
    assert_eq!(
        harness.events_without_times(),
        [Event::ResetStarted { cause: ResetCause::Fatal { csts: 3 } }]
    );
    harness.run_until(|event| *event == Event::Recovered);

    harness.device.state().lose_readiness();
    harness.run_until(|event| {
        matches!(event, Event::ResetStarted { cause: ResetCause::NotReady { .. } })
    });
    harness.run_until(|event| *event == Event::Recovered);
    harness.assert_state(ControllerState::Ready);
}

#[test]
fn replaced_controller_is_rejected() {
    let mut harness = ControllerHarness::ready();
    harness.device.state().identity.push((4, b"SERIAL-2".to_vec()));
    harness.controller.reset(harness.now).unwrap();
    harness.run_until(|event| matches!(event, Event::Dead(_)));
    let Some(Event::Dead(error)) = harness.events_without_times().pop() else { panic!() };
    assert!(error.to_string().contains("SN, MN"), "{error}");
}

#[test]
fn another_namespace_under_the_same_identifier_is_not_used() {
    let mut harness = ControllerHarness::with_pairs(1);
    harness.controller.require_same_namespace(1);
    harness.device.state().disk = 7;
    harness.controller.reset(harness.now).unwrap();
    harness.run_until(|event| matches!(event, Event::Dead(_)));
    let reported_values = harness.events_without_times();
    let resumed = |event: &Event| matches!(event, Event::QueuePairResumed { .. });
    assert!(!reported_values.iter().any(resumed), "{reported_values:?}");
    let Some(Event::Dead(error)) = reported_values.last() else { panic!("{reported_values:?}") };
    let expected = "UUID, NGUID, EUI64 of namespace is 0x1, expected those that it had before";
    assert!(error.to_string().contains(expected), "{error}");
    // A controller that reappears is used again.
    let mut harness = ControllerHarness::with_pairs(1);
    harness.controller.require_same_namespace(1);
    harness.device.state().disk = 7;
    harness.controller.reset(harness.now).unwrap();
    harness.run_until(|event| {
        matches!(event, Event::ResetStarted { cause: ResetCause::InvalidData(_) })
    });
    harness.device.state().disk = 0;
    harness.run_until(|event| matches!(event, Event::QueuePairResumed { .. }));
}

#[test]
fn namespace_changes_during_a_reset_are_reported() {
    let mut harness = ControllerHarness::ready();
    harness.controller.reset(harness.now).unwrap();
    harness.device.state().namespaces.remove(&1);
    harness.run_until(|event| *event == Event::Recovered);
    let reported_values = harness.events_without_times();
    assert_eq!(
        reported_values,
        [
            Event::ResetStarted { cause: ResetCause::Requested },
            Event::NamespaceDetached { id: 1 },
            Event::Recovered
        ]
    );
}

#[test]
fn a_subsystem_reset_is_written_once_and_recovered_from() {
    let mut harness = ControllerHarness::with_pairs(1);
    harness.submit_io(0, 3);
    harness.controller.reset_subsystem(harness.now).unwrap();
    harness.run_until(|event| *event == Event::Recovered);
    harness.run_for(Span::from_ms(20));
    assert_eq!(harness.device.state().subsystem_resets, 1);
    assert_eq!(io_completions(&harness, 0), [(3, IoStatus::ABORTED_BY_HOST)]);
    let mut without =
        ControllerHarness::ready_with(short_timeout_options(), |state| state.cap &= !(1 << 36));
    let refused = without.controller.reset_subsystem(without.now);
    assert!(matches!(refused, Err(RequestError::Unsupported { .. })));
    without.assert_state(ControllerState::Ready);
}

/// Unplugs the device at each register read of a reset.
#[test]
fn unplug_at_any_read_of_a_reset_completes_each_command_once() {
    for later in 1.. {
        let mut harness = ControllerHarness::with_pairs(1);
        harness.device.state().answers_io = false;
        harness.submit_io(0, 7);
        harness.submit_admin(5, 0x0a);
        harness.run_for(Span::from_us(50));
        harness.controller.reset(harness.now).unwrap();
        {
            let mut state = harness.device.state();
            state.unplugged_at_read = state.reads + later;
        }
        harness.run_until(|event| matches!(event, Event::Removed | Event::Recovered));
        harness.run_for(Span::from_ms(20));
        assert_eq!(io_completions(&harness, 0), [(7, IoStatus::ABORTED_BY_HOST)]);
        assert_eq!(admin_completions(&harness).len(), 1, "{:?}", harness.events_without_times());
        if harness.controller.state() == ControllerState::Ready {
            assert!(later > 6, "{later}");
            break;
        }
        harness.assert_queue_state(0, QueueState::Dead);
        assert!(harness.memory.is_dma_revoked());
    }
}

fn lost_write_flags(harness: &ControllerHarness) -> Vec<bool> {
    harness.pairs.iter().map(|(pair, _)| pair.has_lost_writes()).collect()
}

#[test]
fn controller_that_fails_by_itself_has_every_queue_report_lost_writes() {
    let failures: [fn(&mut ControllerHarness); 3] = [
        |harness| harness.device.state().fatal = true,
        |harness| harness.device.state().lose_readiness(),
        |harness| harness.controller.reset_subsystem(harness.now).unwrap(),
    ];
    for (number, fail) in failures.into_iter().enumerate() {
        let mut harness = ControllerHarness::with_pairs(2);
        assert_eq!(lost_write_flags(&harness), [false, false]);
        fail(&mut harness);
        harness.run_until(|event| *event == Event::Recovered);
        harness.run_for(Span::from_ms(50));
        assert_eq!(lost_write_flags(&harness), [true, true], "failure {number}");
        harness.create_queue_pair(None);
        assert_eq!(
            lost_write_flags(&harness),
            [true; 3],
            "no queue has reported the loss: failure {number}"
        );
        harness.pairs[1].0.note_lost_writes_reported();
        harness.create_queue_pair(None);
        assert_eq!(lost_write_flags(&harness), [true, false, true, false], "failure {number}");
    }
}

#[test]
fn reset_by_the_host_loses_no_writes() {
    let mut harness = ControllerHarness::with_pairs(2);
    harness.controller.reset(harness.now).unwrap();
    harness.run_until(|event| *event == Event::Recovered);
    harness.run_for(Span::from_ms(50));
    harness.device.state().answers_io = false;
    harness.device.state().aborts_fail = true;
    harness.submit_io(0, 7);
    harness.run_until(|event| matches!(event, Event::ResetStarted { .. }));
    harness.device.state().answers_io = true;
    harness.run_until(|event| *event == Event::Recovered);
    harness.create_queue_pair(None);
    assert_eq!((lost_write_flags(&harness), reset_count(&harness)), (vec![false; 3], 2));
}

#[test]
fn failure_that_shows_as_an_overdue_command_has_queues_report_lost_writes() {
    let seldom =
        ControllerOptions { status_interval: Span::from_secs(60), ..short_timeout_options() };
    let mut harness = ControllerHarness::ready_with(seldom, |_| {});
    harness.create_queue_pair(None);
    {
        let mut state = harness.device.state();
        (state.answers_io, state.aborts_fail, state.fatal) = (false, true, true);
    }
    harness.submit_io(0, 7);
    harness.run_until(|event| {
        matches!(event, Event::ResetStarted { cause: ResetCause::Queue { .. } })
    });
    harness.run_until(|event| *event == Event::Recovered);
    assert_eq!(lost_write_flags(&harness), [true]);
}

#[test]
fn lost_connection_reports_no_lost_writes_to_an_owner_that_counts_them() {
    let counts = ControllerOptions { owner_counts_losses: true, ..short_timeout_options() };
    let mut harness = ControllerHarness::ready_with(counts, |_| {});
    harness.create_queue_pair(None);
    harness.device.state().fatal = true;
    harness.run_until(|event| *event == Event::Recovered);
    harness.run_for(Span::from_ms(50));
    assert_eq!(lost_write_flags(&harness), [false]);
}
