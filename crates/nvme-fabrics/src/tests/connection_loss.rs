//! Lost connections: every request completes once, in time, and no resources are left behind.

use tenmil_base::{
    ChannelWakeup, CompletionBatch, IoChannel, IoStatus, Memory, Operation, Segment, Span,
};
use tenmil_nvme_host::{ControllerState, Event};
use tenmil_sim::sim_network::{LinkFault, LinkTransferDirection};
use tenmil_wire::fabrics::InvalidParameter;
use tenmil_wire::{Completion, Status};

use super::authentication::{fast_policy, host_with_target, options_with};
use super::simulated_time::SimulatedTime;
use super::single_path_host::SinglePathHost;
use super::target::max_execution_time;
use crate::timeout_policy::TimeoutPolicy;

#[test]
fn cut_connection_is_reconnected_and_usable() {
    let mut host = SinglePathHost::with_queue(32);
    for round in 0..5 {
        host.write_and_verify(round, 8, round);
        host.events.clear();
        host.target.cut();
        host.run_until(|host| host.events.contains(&Event::Recovered));
        host.run_until(|host| host.events.contains(&Event::QueuePairResumed { id: 1 }));
        assert_eq!(host.target.open_connection_count(), 2, "and none is left of before");
    }
    host.write_and_verify(9, 8, 9);
    assert_eq!(host.controller().connection_stats().lost, 5);
    assert_eq!(
        host.controller().last_error().map(|error| error.text).as_deref(),
        Some("the network was cut")
    );
}

/// A caller does not poll a queue without requests in flight: it only submits until the request is
/// accepted.
#[test]
fn idle_queue_reconnects_without_being_polled() {
    let mut host = SinglePathHost::with_queue(32);
    for round in 0..5 {
        host.write_and_verify(round, 8, round);
        let mut queue = host.queues.remove(0);
        host.target.cut();
        host.run_until(|host| host.events.contains(&Event::Recovered));
        let place = host.buffer(0, 8);
        let request = SinglePathHost::request(Operation::Read, round, &[place], 1);
        let mut is_taken = false;
        host.run_until(|host| {
            // The queue returns a useful retry time, and nothing that would keep its thread awake.
            is_taken = queue.submit(host.now, &[request], &[place]) == 1;
            queue.flush_submissions();
            let again = queue.wake_at();
            let soon = host.now..=host.now.after(Span::from_ms(1));
            assert!(is_taken || again > host.now && soon.contains(&again), "{again:?}");
            is_taken
        });
        host.queues.push(queue);
        host.run_until(|host| !host.completions.is_empty());
        let completion = host.completions.remove(0);
        assert_eq!((completion.token, completion.status), (1, IoStatus::SUCCESS), "round {round}");
        host.events.clear();
    }
}

/// The same after an outage that was longer than the fast I/O fail timeout, before or after the old controller
/// was silent: the next request does not fail for an outage that is over.
#[test]
fn queue_without_requests_uses_the_next_controller_however_long_ago_its_requests_failed() {
    for fail_fast in [Span::from_secs(1), Span::from_secs(30)] {
        let mut host = SinglePathHost::new();
        let mut options = SinglePathHost::options();
        options.policy.fail_fast = fail_fast;
        host.connect(options).unwrap();
        host.add_queue(32);
        for round in 0..3 {
            host.write_and_verify(round, 8, round);
            host.target.state().withholds_completions = true;
            let place = host.buffer(0, 8);
            assert!(host.submit(0, Operation::Write, round, &[place], 1));
            host.run_for(Span::from_ms(1));
            (host.target.state().refuses_connections, host.target.state().withholds_completions) =
                (true, false);
            host.target.cut();
            host.run_until(|host| !host.completions.is_empty());
            assert_eq!(host.completions.remove(0).status, IoStatus::PATH_ERROR);
            assert_eq!(
                host.run_request(Operation::Read, 0, &[place]),
                IoStatus::PATH_ERROR,
                "at once"
            );
            let mut queue = host.queues.remove(0);
            host.events.clear();
            host.target.state().refuses_connections = false;
            host.run_until(|host| host.events.contains(&Event::Recovered));
            host.run_for(Span { ns: 2 * fail_fast.ns });
            let request = SinglePathHost::request(Operation::Read, round, &[place], 2);
            let begun = host.now;
            host.run_until(|host| {
                let is_taken = queue.submit(host.now, &[request], &[place]) == 1;
                queue.flush_submissions();
                is_taken
            });
            assert!(host.now.since(begun) < Span::from_ms(20), "{}", host.now.since(begun));
            host.queues.push(queue);
            host.run_until(|host| !host.completions.is_empty());
            assert_eq!(
                host.completions.remove(0).status,
                IoStatus::SUCCESS,
                "{fail_fast}, {round}"
            );
        }
    }
}

/// As when a target is restarted, or its address moves, between the Connect of the admin queue and that
/// of another queue: the target does not know the controller, and reports a permanent error. After any
/// other permanent error the queue is requested again.
#[test]
fn queue_whose_controller_is_gone_reconnects_to_the_next_controller() {
    for (at, in_data, losses) in [(16, true, 2), (42, false, 1)] {
        let field = InvalidParameter(0).with(|dword| dword.ipo(at).in_data(in_data));
        let status = Status::CONNECT_INVALID_PARAMETERS.with_dnr();
        let refusal = Completion::new(0, status).with_dw0(field.0);
        let mut host = SinglePathHost::with_queue(32);
        host.write_and_verify(0, 8, 0);
        host.target.state().refuses_queue = Some(refusal);
        host.target.cut();
        host.run_until(|host| host.target.state().refuses_queue.is_none());
        let place = host.buffer(0, 8);
        assert_eq!(host.run_request(Operation::Read, 0, &[place]), IoStatus::SUCCESS, "byte {at}");
        assert_eq!(host.controller().connection_stats().lost, losses, "byte {at}");
    }
}

/// Reads are sent again as soon as there is a connection. A write may still be executed by the old
/// controller: it is sent again only once that controller is certainly silent.
#[test]
fn only_requests_that_may_execute_late_wait_for_the_old_controller() {
    let TimeoutPolicy { detect, .. } = TimeoutPolicy::default();
    let max_execution_time = max_execution_time(detect, false);
    for (operation, least, most) in [
        (Operation::Read, Span::default(), Span::from_ms(150)),
        (Operation::Write, max_execution_time, Span { ns: max_execution_time.ns + 500_000_000 }),
    ] {
        let mut host = SinglePathHost::with_queue(32);
        // A reconnect is not attempted immediately after the last one.
        host.run_for(TimeoutPolicy::default().retry);
        host.target.state().withholds_completions = true;
        let place = host.buffer(0, 8);
        assert!(host.submit(0, operation, 0, &[place], 1));
        host.run_for(Span::from_ms(1));
        host.target.cut();
        host.target.state().withholds_completions = false;
        let cut_at = host.now;
        host.run_until(|host| !host.completions.is_empty());
        let waited = host.now.since(cut_at);
        assert!((least..most).contains(&waited), "{operation:?}: {waited}");
        assert_eq!(host.completions[0].status, IoStatus::SUCCESS);
        host.completions.clear();
        host.write_and_verify(3, 8, 3);
    }
}

/// Data of an interrupted write that the network still holds may be sent: the memory is not released
/// before, whichever thread detects the end first.
#[test]
fn memory_is_released_once_the_network_cannot_send_it() {
    let lag = Span::from_secs(8);
    for (front_is_ahead, is_executed) in [(false, false), (true, false), (false, true)] {
        let mut host = host_on_retransmitting_network(lag);
        host.write_and_verify(0, 8, 0);
        host.target.state().withholds_completions = !is_executed;
        let place = host.buffer(2, 8);
        assert!(host.submit(0, Operation::Write, 0, &[place], 1));
        host.run_for(Span::from_ms(1));
        let sent_at = host.now;
        host.target.cut();
        host.target.state().withholds_completions = false;
        let queues = std::mem::take(&mut host.queues);
        host.run_for(if front_is_ahead { Span::from_secs(1) } else { Span::default() });
        host.queues = queues;
        host.poll_queues();
        host.run_until(|host| !host.completions.is_empty());
        let waited = host.now.since(sent_at);
        assert!(waited.ns + 1_000_000 >= 2 * lag.ns, "{waited}: once it was cut, once executed");
        assert_eq!(host.completions[0].status, IoStatus::SUCCESS);
        host.regions.fill(place, 0x5a).unwrap();
        host.run_for(Span { ns: 2 * lag.ns });
        let networks = host.target.state().networks.clone();
        let strays: Vec<String> =
            networks.iter().flat_map(|network| network.changed_unreleased_memory()).collect();
        assert_eq!(strays, [""; 0], "{front_is_ahead}");
    }
}

/// Like a cut connection, for every other reason to give up on a command: a reset of the controller by
/// its owner, a missed deadline of the command, or the maximum hold time of the request.
#[test]
fn memory_of_abandoned_requests_is_released_once_the_network_cannot_send_it() {
    for (close_reason, lag, outcome) in [
        (CloseReason::Reset, Span::from_secs(8), IoStatus::SUCCESS),
        (CloseReason::Deadline, Span::from_secs(75), IoStatus::SUCCESS),
        (CloseReason::FailFast, Span::from_secs(45), IoStatus::PATH_ERROR),
    ] {
        let (mut host, place) = host_with_unreleased_write(lag);
        let sent_at = host.now;
        match close_reason {
            CloseReason::Reset => host.controller().controller().reset(sent_at).unwrap(),
            CloseReason::Deadline => {}
            CloseReason::FailFast => {
                host.target.state().refuses_connections = true;
                host.target.cut();
            }
        }
        host.run_for(Span { ns: lag.ns - 1_000_000_000 });
        assert_eq!(host.completions, [], "{close_reason:?}");
        assert!(!host.target.state().is_enabled(), "{close_reason:?}: nothing was given up");
        host.target.state().withholds_completions = false;
        host.run_until(|host| !host.completions.is_empty());
        let waited = host.now.since(sent_at);
        assert!(waited >= lag, "{close_reason:?}: {waited}");
        assert_eq!(host.completions[0].status, outcome, "{close_reason:?}");
        host.regions.fill(place, 0x5a).unwrap();
        host.run_for(Span { ns: 2 * lag.ns });
        let networks = host.target.state().networks.clone();
        let strays: Vec<String> =
            networks.iter().flat_map(|network| network.changed_unreleased_memory()).collect();
        assert_eq!(strays, [""; 0], "{close_reason:?}");
        assert_eq!(host.completions.len(), 1, "{close_reason:?}: once");
    }
}

/// A dropped queue with a write in flight leaves its connection open: it is not reported closed, so no
/// memory is released while the network may still send from it.
#[test]
fn memory_of_dropped_queue_is_held_while_the_network_can_send_it() {
    for is_cut_first in [false, true] {
        let lag = Span::from_secs(75);
        let (mut host, _) = host_with_unreleased_write(lag);
        let sent_at = host.now;
        if is_cut_first {
            host.target.cut();
            host.poll_queues();
        }
        host.queues.clear();
        host.controller().controller().reset(sent_at).unwrap();
        host.run_for(Span { ns: lag.ns - 1_000_000_000 });
        assert_ne!(
            host.controller().controller().state(),
            ControllerState::Ready,
            "{is_cut_first}"
        );
        host.run_until(|host| host.controller().controller().state() == ControllerState::Ready);
        let waited = host.now.since(sent_at);
        assert!(waited >= lag, "{is_cut_first}: {waited}");
    }
}

/// Reason for closing a connection.
#[derive(Clone, Copy, Debug)]
enum CloseReason {
    Reset,
    Deadline,
    FailFast,
}

/// A host with a queue, whose network may retransmit data for the time `lag`.
fn host_on_retransmitting_network(lag: Span) -> SinglePathHost {
    let mut host = SinglePathHost::new();
    host.target.state().network.release_lag = lag;
    host.target.state().network.copied_below = 4096;
    host.connect(SinglePathHost::options()).unwrap();
    host.add_queue(32);
    host
}

/// A host with a write in flight that does not complete, and the memory of its data: the network may
/// retransmit the data for the time `lag`.
fn host_with_unreleased_write(lag: Span) -> (SinglePathHost, Segment) {
    let mut host = host_on_retransmitting_network(lag);
    host.target.state().withholds_completions = true;
    let place = host.buffer(2, 8);
    assert!(host.submit(0, Operation::Write, 0, &[place], 1));
    host.run_for(Span::from_ms(1));
    // The next connections have no lag.
    host.target.state().network.release_lag = Span::default();
    (host, place)
}

/// Which of the two threads detects a cut first, and how much later the other one does, has no effect on
/// the time before a write is sent again.
#[test]
fn quiesce_time_elapses_whichever_thread_detects_the_loss_first() {
    let TimeoutPolicy { detect, .. } = TimeoutPolicy::default();
    let max_execution_time = max_execution_time(detect, false);
    for front_is_ahead_by in [None, Some(Span::from_secs(3))] {
        let mut host = SinglePathHost::with_queue(32);
        host.run_for(TimeoutPolicy::default().retry);
        host.target.state().withholds_completions = true;
        let place = host.buffer(0, 8);
        assert!(host.submit(0, Operation::Write, 0, &[place], 1));
        host.run_for(Span::from_ms(1));
        host.target.cut();
        host.target.state().withholds_completions = false;
        let queues = std::mem::take(&mut host.queues);
        host.run_for(front_is_ahead_by.unwrap_or_default());
        host.queues = queues;
        host.poll_queues();
        let silent_since = host.now;
        host.run_until(|host| !host.completions.is_empty());
        let waited = host.now.since(silent_since);
        assert!(waited >= max_execution_time, "{front_is_ahead_by:?}: {waited}");
        assert_eq!(host.completions[0].status, IoStatus::SUCCESS);
    }
}

#[test]
fn requests_fail_after_fast_io_fail_timeout_and_succeed_after_reconnect() {
    let mut host = SinglePathHost::with_queue(8);
    host.target.state().withholds_completions = true;
    let place = host.buffer(0, 1);
    (0..5).for_each(|token| assert!(host.submit(0, Operation::Read, token, &[place], token)));
    host.run_for(Span::from_ms(1));
    host.target.state().refuses_connections = true;
    host.target.cut();
    let begun = host.now;
    host.run_for(Span::from_ms(10));
    assert!(!host.submit(0, Operation::Read, 9, &[place], 9), "the request stays with its caller");
    host.run_until(|host| host.completions.len() == 5);
    let TimeoutPolicy { fail_fast, .. } = TimeoutPolicy::default();
    let waited = host.now.since(begun);
    assert!((fail_fast..Span { ns: fail_fast.ns + 200_000_000 }).contains(&waited), "{waited}");
    assert!(host.completions.iter().all(|completion| completion.status == IoStatus::PATH_ERROR));
    host.completions.clear();
    assert_eq!(host.run_request(Operation::Read, 0, &[place]), IoStatus::PATH_ERROR, "at once");
    assert!(host.now.since(begun) < Span { ns: fail_fast.ns + 300_000_000 });
    host.target.state().refuses_connections = false;
    host.target.state().withholds_completions = false;
    host.run_until(|host| host.events.contains(&Event::QueuePairResumed { id: 1 }));
    host.run_for(Span::from_ms(10));
    host.write_and_verify(1, 8, 1);
}

#[test]
fn silent_target_is_detected_within_the_keep_alive_timeout() {
    let mut host = SinglePathHost::with_queue(32);
    host.write_and_verify(0, 8, 0);
    for network in &host.target.state().networks {
        network.inject_fault(LinkTransferDirection::Downstream, LinkFault::BlackHole);
    }
    let begun = host.now;
    host.run_until(|host| host.controller().connection_stats().lost == 1);
    let TimeoutPolicy { detect, .. } = TimeoutPolicy::default();
    assert!(host.now.since(begun) <= Span { ns: detect.ns + 100_000_000 });
    assert_eq!(
        host.controller().last_error().map(|error| error.text).as_deref(),
        Some("a Keep Alive was not answered in time")
    );
    host.run_until(|host| host.events.contains(&Event::QueuePairResumed { id: 1 }));
    host.write_and_verify(1, 8, 1);
}

#[test]
fn unreachable_target_is_removed_after_ctrl_loss_timeout_and_all_requests_complete() {
    let mut host = SinglePathHost::with_queue(32);
    let free = host.free_bytes();
    host.target.state().withholds_completions = true;
    let place = host.buffer(0, 1);
    (0..10).for_each(|token| assert!(host.submit(0, Operation::Read, token, &[place], token)));
    host.run_for(Span::from_ms(1));
    host.target.state().refuses_connections = true;
    host.target.cut();
    let begun = host.now;
    while host.controller().is_usable() {
        host.now = host.now.after(Span::from_ms(20));
        host.step();
        assert!(host.now.since(begun) < Span::from_secs(700), "{:?}", host.events);
    }
    let TimeoutPolicy { give_up, retry, .. } = TimeoutPolicy::default();
    assert!(host.now.since(begun) >= give_up, "not before its time");
    let tries = host.controller().connection_stats().attempts;
    assert!((500..=give_up.ns / retry.ns + 10).contains(&tries), "{tries}");
    assert_eq!(host.controller().controller().state(), ControllerState::Removed);
    host.run_for(Span::from_ms(10));
    let mut tokens: Vec<u64> = host.completions.iter().map(|completion| completion.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..10).collect::<Vec<_>>());
    assert_eq!(host.run_request(Operation::Read, 0, &[place]), IoStatus::PATH_ERROR);
    assert_eq!(host.target.open_connection_count(), 0);
    host.queues.clear();
    host.multipath = None;
    assert!(host.free_bytes() > free, "rings and lists have come back");
}

/// As when a controller is restarted from the other side during a reset by the driver.
#[test]
fn target_unreachable_during_a_reset_is_reconnected() {
    let mut host = SinglePathHost::with_queue(8);
    let now = host.now;
    host.controller().controller().reset(now).unwrap();
    host.target.state().refuses_connections = true;
    host.run_for(Span::from_secs(20));
    assert!(host.controller().is_usable() && host.controller().lost_since().is_some());
    host.target.state().refuses_connections = false;
    host.run_until(|host| host.events.contains(&Event::QueuePairResumed { id: 1 }));
    assert_eq!(host.controller().lost_since(), None);
    host.write_and_verify(1, 8, 1);
}

/// It does not justify repeated resets of everything, least of all if it is what breaks the peer.
#[test]
fn request_that_never_completes_fails_after_limited_resets_and_others_succeed() {
    let mut host = SinglePathHost::with_queue(8);
    host.target.state().withholds_completions = true;
    host.target.state().withheld_opcode = Some(tenmil_wire::AdminOpcode::Abort.code());
    let place = host.buffer(0, 1);
    assert!(host.submit(0, Operation::Read, 1, &[place], 1));
    let begun = host.now;
    while host.completions.is_empty() {
        host.now = host.now.after(Span::from_ms(5));
        host.step();
        assert!(host.now.since(begun) < Span::from_secs(600), "it is repeated without end");
    }
    assert_eq!(host.completions.remove(0).status, IoStatus::ABORTED_BY_HOST);
    let resets = host.events.iter().filter(|event| **event == Event::Recovered).count();
    assert_eq!(resets, 2, "it was sent three times");
    host.target.state().withholds_completions = false;
    host.target.state().withheld_opcode = None;
    host.run_until(|host| host.controller().controller().state() == ControllerState::Ready);
    host.write_and_verify(3, 8, 3);
}

/// Whatever was in its slot before, so that a controller can find it.
#[test]
fn abort_uses_the_cid_of_the_command_capsule() {
    let mut host = SinglePathHost::with_queue(8);
    for round in 0..20 {
        host.write_and_verify(round, 8, round);
    }
    host.target.state().withholds_completions = true;
    let place = host.buffer(0, 1);
    assert!(host.submit(0, Operation::Read, 1, &[place], 1));
    host.run_until(|host| !host.target.state().aborted.is_empty());
    let state = host.target.state();
    assert_eq!(state.aborted, state.unanswered);
    assert!(state.unanswered[0] > 8, "its slot was used before");
}

/// An address means nothing to a connection.
#[test]
fn a_raw_command_with_a_data_pointer_of_its_own_is_rejected() {
    let mut host = SinglePathHost::new();
    let (_remote, mut queue_pair) = host.queue_pair_without_retries(8);
    let command = tenmil_wire::Command::new(2).with_nsid(1).with_prp(4096, 0);
    let now = host.now;
    queue_pair.driver_queue().submit_raw(now, 7, command, &[], &[], None).unwrap();
    let mut completions = CompletionBatch::with_capacity(1);
    queue_pair.poll_raw(now, &mut completions);
    let completion = completions.as_slice()[0];
    assert_eq!((completion.token, completion.status), (7, IoStatus::INVALID_FIELD));
}

/// A reset of the controller for other reasons is no evidence against the requests in flight.
#[test]
fn request_survives_resets_caused_by_others() {
    let mut host = SinglePathHost::with_queue(8);
    host.target.state().withholds_completions = true;
    let place = host.buffer(0, 1);
    assert!(host.submit(0, Operation::Read, 1, &[place], 1));
    for _ in 0..8 {
        host.run_for(Span::from_ms(1));
        host.events.clear();
        let now = host.now;
        host.controller().controller().reset(now).unwrap();
        host.run_until(|host| host.events.contains(&Event::QueuePairResumed { id: 1 }));
    }
    assert_eq!(host.completions, []);
    host.target.state().withholds_completions = false;
    host.run_for(Span::from_ms(1));
    host.events.clear();
    let now = host.now;
    host.controller().controller().reset(now).unwrap();
    host.run_until(|host| !host.completions.is_empty());
    assert_eq!(host.completions[0].status, IoStatus::SUCCESS);
}

/// The cause of repeated disconnects is found among the requests that were in flight with it.
#[test]
fn request_that_breaks_the_connection_fails_and_others_succeed() {
    let mut host = SinglePathHost::with_queue(8);
    host.target.state().fatal_lba = Some(5);
    let place = host.buffer(0, 1);
    for lba in 3..8 {
        assert!(host.submit(0, Operation::Read, lba, &[place], lba));
    }
    host.run_until(|host| host.completions.len() == 5);
    for completion in &host.completions {
        let is_guilty = completion.token == 5;
        let expected = if is_guilty { IoStatus::ABORTED_BY_HOST } else { IoStatus::SUCCESS };
        assert_eq!(completion.status, expected, "{completion:?}");
    }
    host.completions.clear();
    host.write_and_verify(9, 8, 9);
}

/// Bytes transferred on each stream in a session of one write and one read.
fn stream_lengths(is_authenticated: bool) -> Vec<(usize, LinkTransferDirection, u64)> {
    let host = run_session_with_cut(is_authenticated, None);
    let state = host.target.state();
    let each = state.networks.iter().enumerate().flat_map(|(number, network)| {
        [LinkTransferDirection::Upstream, LinkTransferDirection::Downstream]
            .map(|way| (number, way, network.arrived_byte_count(way)))
    });
    each.collect()
}

/// A session with a fault on one stream: it does not connect, or everything succeeds in the end; in
/// either case no resources are left behind.
fn run_session_with_cut(
    is_authenticated: bool,
    cut_fault: Option<(usize, LinkTransferDirection, u64)>,
) -> SinglePathHost {
    let (mut host, options) = if is_authenticated {
        (host_with_target(fast_policy()), options_with(1, Some(2), fast_policy()))
    } else {
        (SinglePathHost::new(), SinglePathHost::options())
    };
    let free = host.free_bytes();
    host.target.state().cut_fault = cut_fault;
    if host.connect(options).is_ok() {
        host.add_queue(8);
        host.write_and_verify(3, 16, 3);
        host.queues.clear();
        host.run_until(|host| host.controller().controller().state() == ControllerState::Ready);
        host.shut_down();
    }
    host.multipath = None;
    (0..3).for_each(|_| host.step());
    assert_eq!(host.target.open_connection_count(), 0, "{cut_fault:?}");
    assert_eq!(host.free_bytes(), free, "{cut_fault:?}");
    host
}

/// Runs sessions that are cut at the bytes of each stream that `is_one` selects; returns their number.
fn run_cut_sessions(is_authenticated: bool, is_one: impl Fn(u64, u64) -> bool) -> u64 {
    let mut count = 0;
    for (number, way, len) in stream_lengths(is_authenticated) {
        for at in (0..len).filter(|at| is_one(*at, len)) {
            run_session_with_cut(is_authenticated, Some((number, way, at)));
            count += 1;
        }
    }
    count
}

#[test]
fn stream_cut_at_any_byte_leaks_nothing() {
    // All of the first bytes, in which a connection is opened, and some of the others.
    let count = run_cut_sessions(false, |at, len| at < 300 || at % 61 == 0 || len - at < 100);
    assert!(count > 1500, "{count} cuts");
}

/// Within ICReq, Connect and the five messages of an authentication of both ends, and after them.
#[test]
fn stream_cut_at_any_byte_of_an_authentication_leaks_nothing() {
    let upstream = 128 + 72 + 1024 + 4 * 72 + 72 + 80 + 16;
    let count = run_cut_sessions(true, |at, len| {
        at < upstream && at % 7 == 0 || at % 61 == 0 || len - at < 100
    });
    assert!(count > 900, "{count} cuts");
}

#[test]
#[ignore = "takes minutes: .ci/nightly runs it"]
fn stream_cut_at_every_byte_leaks_nothing() {
    for is_authenticated in [false, true] {
        let lengths = stream_lengths(is_authenticated);
        let bytes = lengths.iter().map(|(.., len)| len).sum::<u64>();
        assert_eq!(run_cut_sessions(is_authenticated, |_, _| true), bytes);
    }
}

/// The reset goes over the intact admin connection, and the controller confirms that it has stopped.
#[test]
fn queue_lost_alone_is_recreated_without_the_quiesce_time() {
    let mut host = SinglePathHost::with_queue(32);
    host.run_for(TimeoutPolicy::default().retry);
    host.target.state().withholds_completions = true;
    let place = host.buffer(0, 8);
    assert!(host.submit(0, Operation::Write, 0, &[place], 1));
    host.run_for(Span::from_ms(1));
    host.target.state().networks[1].cut_links();
    host.target.state().withholds_completions = false;
    let cut_at = host.now;
    host.run_until(|host| !host.completions.is_empty());
    assert!(host.now.since(cut_at) < Span::from_ms(300), "{}", host.now.since(cut_at));
    assert_eq!(host.completions[0].status, IoStatus::SUCCESS);
    host.write_and_verify(3, 8, 3);
}

/// A closed socket still delivers its buffered data, except commands that change a block: these are
/// discarded.
#[test]
fn buffered_commands_that_modify_blocks_are_discarded_with_the_connection() {
    for (operation, is_delivered) in [(Operation::WriteZeroes, false), (Operation::Read, true)] {
        let mut host = SinglePathHost::new();
        let identity = host.target.state().identity.clone().with(|it| it.oncs(8));
        host.target.state().identity = identity;
        host.connect(SinglePathHost::options()).unwrap();
        host.add_queue(32);
        let network = host.target.state().networks[1].clone();
        network.inject_fault(LinkTransferDirection::Upstream, LinkFault::Freeze(Span::from_ms(1)));
        let place = host.buffer(0, 8);
        assert!(host.submit(0, operation, 0, &[place], 1));
        let now = host.now;
        host.controller().controller().reset(now).unwrap();
        host.run_for(Span::from_us(500));
        assert_eq!(host.target.state().received_io_commands, 0, "it lies there");
        host.target.state().withholds_completions = true;
        host.run_for(Span::from_ms(2));
        assert_eq!(host.target.state().received_io_commands > 0, is_delivered, "{operation:?}");
    }
}

/// Its controller completes Keep Alive all the while. Only one of several connections stalls.
#[test]
fn stalled_queue_connection_is_detected_while_keep_alive_succeeds() {
    for count in [1, 5] {
        let mut host = SinglePathHost::with_queue(32);
        host.write_and_verify(0, 8, 0);
        host.target.state().networks[1]
            .inject_fault(LinkTransferDirection::Downstream, LinkFault::BlackHole);
        let begun = host.now;
        let place = host.buffer(0, 8);
        (0..count).for_each(|token| assert!(host.submit(0, Operation::Read, 0, &[place], token)));
        host.run_until(|host| host.controller().connection_stats().lost == 1);
        let (waited, TimeoutPolicy { detect, .. }) =
            (host.now.since(begun), TimeoutPolicy::default());
        assert!(waited <= Span { ns: detect.ns + 100_000_000 }, "{waited}");
        let why = host.controller().last_error().unwrap().text;
        assert!(why.starts_with("nothing came over the connection of a queue"), "{why}");
        host.run_until(|host| host.completions.len() == usize::try_from(count).unwrap());
        assert!(host.completions.iter().all(|completion| completion.status.is_success()));
        assert!(host.now.since(begun) < Span::from_secs(7), "{}", host.now.since(begun));
    }
}

/// Within its permitted time.
#[test]
fn slow_device_is_not_taken_for_a_stalled_connection() {
    for count in [1, 20] {
        let mut host = SinglePathHost::with_queue(32);
        host.target.state().withholds_completions = true;
        let place = host.buffer(0, 8);
        (0..count).for_each(|token| assert!(host.submit(0, Operation::Read, 0, &[place], token)));
        host.run_for(Span::from_secs(28));
        assert_eq!((host.controller().connection_stats().lost, host.completions.len()), (0, 0));
        // Later requests succeed.
        host.target.state().withholds_completions = false;
        host.write_and_verify(3, 8, 3);
    }
}

/// The peer answers commands and leaves the probe unanswered: there is no second one beside it.
#[test]
fn unanswered_probe_is_not_repeated_and_closes_the_connection() {
    let mut host = SinglePathHost::with_queue(32);
    host.target.state().ignores_probes = true;
    let place = host.buffer(0, 8);
    let read = |host: &mut SinglePathHost, token| {
        assert!(host.submit(0, Operation::Read, 0, &[place], token));
        host.run_for(Span::from_us(500));
    };
    host.target.state().withholds_completions = true;
    read(&mut host, 1);
    // Completed after the probe, which is sent between a third and two thirds of `detect`.
    host.target.state().withholds_completions = false;
    host.target.state().delay = Some(Span::from_secs(4));
    read(&mut host, 2);
    host.run_until(|host| host.completions.len() == 1);
    let begun = host.now;
    host.run_until(|host| host.controller().connection_stats().lost == 1);
    let (waited, detect) = (host.now.since(begun), TimeoutPolicy::default().detect);
    assert!(waited <= Span { ns: detect.ns + 100_000_000 }, "{waited}");
}

/// There is no free entry for a probe.
#[test]
fn stalled_connection_of_a_full_queue_is_noticed_when_requests_may_be_held_no_longer() {
    let mut host = SinglePathHost::with_queue(8);
    host.write_and_verify(0, 8, 0);
    host.target.state().networks[1]
        .inject_fault(LinkTransferDirection::Downstream, LinkFault::BlackHole);
    let begun = host.now;
    let place = host.buffer(0, 8);
    let fits =
        |host: &mut SinglePathHost, token| host.submit(0, Operation::Read, 0, &[place], token);
    let count = (0..32).take_while(|token| fits(&mut host, *token)).count();
    host.run_until(|host| host.controller().connection_stats().lost == 1);
    let (waited, TimeoutPolicy { detect, fail_fast, .. }) =
        (host.now.since(begun), TimeoutPolicy::default());
    assert!(waited <= Span { ns: detect.ns + fail_fast.ns }, "{waited}");
    host.run_until(|host| host.completions.len() == count);
}

/// Like common discovery controllers: Connect carried a timeout, so it counts.
#[test]
fn controller_with_kas_zero_receives_keep_alive() {
    let mut host = SinglePathHost::new();
    let identity = host.target.state().identity.clone().with(|it| it.kas(0));
    host.target.state().identity = identity;
    host.connect(SinglePathHost::options()).unwrap();
    host.add_queue(8);
    let before = host.target.state().keep_alives;
    host.run_for(Span::from_secs(40));
    host.write_and_verify(1, 8, 1);
    assert_eq!(
        host.controller().connection_stats().lost,
        0,
        "{:?}",
        host.controller().last_error()
    );
    // One in each half of the 5 s that Connect had as its keep-alive timeout, and no more.
    let sent = host.target.state().keep_alives - before;
    assert!((15..=17).contains(&sent), "{sent}");
}
