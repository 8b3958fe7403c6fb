//! Lost connections: every request completes once, in time, and no resources are left behind.

use tenmil_base::{
    ChannelWakeup, CompletionBatch, IoChannel, IoStatus, Memory, Operation, Segment, Span,
};
use tenmil_nvme_host::{Event, State};
use tenmil_sim::sim_network::{LinkFault, LinkSide};
use tenmil_wire::fabrics::InvalidParameter;
use tenmil_wire::{Completion, Status};

use super::bed::Bed;
use super::target::quiet;
use super::turning::Turning;
use crate::timeout_policy::TimeoutPolicy;

#[test]
fn a_connection_that_is_cut_is_made_again_and_goes_on() {
    let mut bed = Bed::with_queue(32);
    for round in 0..5 {
        bed.exchange(round, 8, round);
        bed.events.clear();
        bed.target.cut();
        bed.turn_until(|bed| bed.events.contains(&Event::Recovered));
        bed.turn_until(|bed| bed.events.contains(&Event::QueuePairResumed { id: 1 }));
        assert_eq!(bed.target.connections(), 2, "and none is left of before");
    }
    bed.exchange(9, 8, 9);
    assert_eq!(bed.remote().counts().lost, 5);
    assert_eq!(bed.remote().last_error().as_deref(), Some("the network was cut"));
}

/// A caller does not poll a queue without requests in flight: it only submits until the request is
/// accepted.
#[test]
fn a_queue_that_owes_nothing_comes_back_without_being_polled() {
    let mut bed = Bed::with_queue(32);
    for round in 0..5 {
        bed.exchange(round, 8, round);
        let mut queue = bed.queues.remove(0);
        bed.target.cut();
        bed.turn_until(|bed| bed.events.contains(&Event::Recovered));
        let place = bed.place(0, 8);
        let request = Bed::request(Operation::Read, round, &[place], 1);
        let mut is_taken = false;
        bed.turn_until(|bed| {
            // The queue returns a useful retry time, and nothing that would keep its thread awake.
            is_taken = queue.submit(bed.now, &[request], &[place]) == 1;
            queue.flush();
            let again = queue.wake_at();
            let soon = bed.now..=bed.now.after(Span::from_ms(1));
            assert!(is_taken || again > bed.now && soon.contains(&again), "{again:?}");
            is_taken
        });
        bed.queues.push(queue);
        bed.turn_until(|bed| !bed.completions.is_empty());
        let completion = bed.completions.remove(0);
        assert_eq!((completion.token, completion.status), (1, IoStatus::SUCCESS), "round {round}");
        bed.events.clear();
    }
}

/// The same after an outage that was longer than the fast I/O fail timeout, before or after the old controller
/// was silent: the next request does not fail for an outage that is over.
#[test]
fn queue_without_requests_uses_the_next_controller_however_long_ago_its_requests_failed() {
    for fail_fast in [Span::from_secs(1), Span::from_secs(30)] {
        let mut bed = Bed::new();
        let mut options = Bed::options();
        options.policy.fail_fast = fail_fast;
        bed.call(options).unwrap();
        bed.add_queue(32);
        for round in 0..3 {
            bed.exchange(round, 8, round);
            bed.target.state().is_idle = true;
            let place = bed.place(0, 8);
            assert!(bed.submit(0, Operation::Write, round, &[place], 1));
            bed.turn_for(Span::from_ms(1));
            (bed.target.state().is_away, bed.target.state().is_idle) = (true, false);
            bed.target.cut();
            bed.turn_until(|bed| !bed.completions.is_empty());
            assert_eq!(bed.completions.remove(0).status, IoStatus::PATH_ERROR);
            assert_eq!(bed.run(Operation::Read, 0, &[place]), IoStatus::PATH_ERROR, "at once");
            let mut queue = bed.queues.remove(0);
            bed.events.clear();
            bed.target.state().is_away = false;
            bed.turn_until(|bed| bed.events.contains(&Event::Recovered));
            bed.turn_for(Span { ns: 2 * fail_fast.ns });
            let request = Bed::request(Operation::Read, round, &[place], 2);
            let begun = bed.now;
            bed.turn_until(|bed| {
                let is_taken = queue.submit(bed.now, &[request], &[place]) == 1;
                queue.flush();
                is_taken
            });
            assert!(bed.now.since(begun) < Span::from_ms(20), "{}", bed.now.since(begun));
            bed.queues.push(queue);
            bed.turn_until(|bed| !bed.completions.is_empty());
            assert_eq!(bed.completions.remove(0).status, IoStatus::SUCCESS, "{fail_fast}, {round}");
        }
    }
}

/// As when a target is restarted, or its address moves, between the Connect of the admin queue and that
/// of another queue: the target does not know the controller, and reports a permanent error. After any
/// other permanent error the queue is requested again.
#[test]
fn a_queue_whose_controller_is_not_there_any_more_goes_on_with_the_next_one() {
    for (at, in_data, losses) in [(16, true, 2), (42, false, 1)] {
        let field = InvalidParameter(0).with(|dword| dword.ipo(at).in_data(in_data));
        let status = Status::CONNECT_INVALID_PARAMETERS.with_dnr();
        let refusal = Completion::new(0, status).with_dw0(field.0);
        let mut bed = Bed::with_queue(32);
        bed.exchange(0, 8, 0);
        bed.target.state().refuses_queue = Some(refusal);
        bed.target.cut();
        bed.turn_until(|bed| bed.target.state().refuses_queue.is_none());
        let place = bed.place(0, 8);
        assert_eq!(bed.run(Operation::Read, 0, &[place]), IoStatus::SUCCESS, "byte {at}");
        assert_eq!(bed.remote().counts().lost, losses, "byte {at}");
    }
}

/// Reads are sent again as soon as there is a connection. A write may still be executed by the old
/// controller: it is sent again only once that controller is certainly silent.
#[test]
fn what_may_be_executed_late_is_waited_for_and_nothing_else_is() {
    let TimeoutPolicy { detect, .. } = TimeoutPolicy::default();
    let quiet = quiet(detect, false);
    for (operation, least, most) in [
        (Operation::Read, Span::default(), Span::from_ms(150)),
        (Operation::Write, quiet, Span { ns: quiet.ns + 500_000_000 }),
    ] {
        let mut bed = Bed::with_queue(32);
        // A reconnect is not attempted immediately after the last one.
        bed.turn_for(TimeoutPolicy::default().retry);
        bed.target.state().is_idle = true;
        let place = bed.place(0, 8);
        assert!(bed.submit(0, operation, 0, &[place], 1));
        bed.turn_for(Span::from_ms(1));
        bed.target.cut();
        bed.target.state().is_idle = false;
        let cut_at = bed.now;
        bed.turn_until(|bed| !bed.completions.is_empty());
        let waited = bed.now.since(cut_at);
        assert!((least..most).contains(&waited), "{operation:?}: {waited}");
        assert_eq!(bed.completions[0].status, IoStatus::SUCCESS);
        bed.completions.clear();
        bed.exchange(3, 8, 3);
    }
}

/// Data of an interrupted write that the network still holds may be sent: the memory is not released
/// before, whichever thread detects the end first.
#[test]
fn memory_goes_back_when_nothing_of_it_can_leave_any_more() {
    let lag = Span::from_secs(8);
    for (front_is_ahead, is_executed) in [(false, false), (true, false), (false, true)] {
        let mut bed = bed_that_sends_again(lag);
        bed.exchange(0, 8, 0);
        bed.target.state().is_idle = !is_executed;
        let place = bed.place(2, 8);
        assert!(bed.submit(0, Operation::Write, 0, &[place], 1));
        bed.turn_for(Span::from_ms(1));
        let sent_at = bed.now;
        bed.target.cut();
        bed.target.state().is_idle = false;
        let queues = std::mem::take(&mut bed.queues);
        bed.turn_for(if front_is_ahead { Span::from_secs(1) } else { Span::default() });
        bed.queues = queues;
        bed.turn_queues();
        bed.turn_until(|bed| !bed.completions.is_empty());
        let waited = bed.now.since(sent_at);
        assert!(waited.ns + 1_000_000 >= 2 * lag.ns, "{waited}: once it was cut, once executed");
        assert_eq!(bed.completions[0].status, IoStatus::SUCCESS);
        bed.regions.fill(place, 0x5a).unwrap();
        bed.turn_for(Span { ns: 2 * lag.ns });
        let networks = bed.target.state().networks.clone();
        let strays: Vec<String> =
            networks.iter().flat_map(|network| network.changed_unreleased_memory()).collect();
        assert_eq!(strays, [""; 0], "{front_is_ahead}");
    }
}

/// Like a cut connection, for every other reason to give up on a command: a reset of the controller by
/// its owner, a missed deadline of the command, or the maximum hold time of the request.
#[test]
fn memory_of_what_a_host_gives_up_goes_back_when_nothing_of_it_can_leave_any_more() {
    for (giving_up, lag, outcome) in [
        (GivingUp::Reset, Span::from_secs(8), IoStatus::SUCCESS),
        (GivingUp::Deadline, Span::from_secs(75), IoStatus::SUCCESS),
        (GivingUp::FailFast, Span::from_secs(45), IoStatus::PATH_ERROR),
    ] {
        let (mut bed, place) = bed_with_a_write_that_lingers(lag);
        let sent_at = bed.now;
        match giving_up {
            GivingUp::Reset => bed.remote().controller().reset(sent_at).unwrap(),
            GivingUp::Deadline => {}
            GivingUp::FailFast => {
                bed.target.state().is_away = true;
                bed.target.cut();
            }
        }
        bed.turn_for(Span { ns: lag.ns - 1_000_000_000 });
        assert_eq!(bed.completions, [], "{giving_up:?}");
        assert!(!bed.target.state().is_wanted(), "{giving_up:?}: nothing was given up");
        bed.target.state().is_idle = false;
        bed.turn_until(|bed| !bed.completions.is_empty());
        let waited = bed.now.since(sent_at);
        assert!(waited >= lag, "{giving_up:?}: {waited}");
        assert_eq!(bed.completions[0].status, outcome, "{giving_up:?}");
        bed.regions.fill(place, 0x5a).unwrap();
        bed.turn_for(Span { ns: 2 * lag.ns });
        let networks = bed.target.state().networks.clone();
        let strays: Vec<String> =
            networks.iter().flat_map(|network| network.changed_unreleased_memory()).collect();
        assert_eq!(strays, [""; 0], "{giving_up:?}");
        assert_eq!(bed.completions.len(), 1, "{giving_up:?}: once");
    }
}

/// A dropped queue with a write in flight leaves its connection open: it is not reported closed, so no
/// memory is released while the network may still send from it.
#[test]
fn memory_of_a_queue_that_is_dropped_is_held_while_any_of_it_can_leave() {
    for is_cut_first in [false, true] {
        let lag = Span::from_secs(75);
        let (mut bed, _) = bed_with_a_write_that_lingers(lag);
        let sent_at = bed.now;
        if is_cut_first {
            bed.target.cut();
            bed.turn_queues();
        }
        bed.queues.clear();
        bed.remote().controller().reset(sent_at).unwrap();
        bed.turn_for(Span { ns: lag.ns - 1_000_000_000 });
        assert_ne!(bed.remote().controller().state(), State::Ready, "{is_cut_first}");
        bed.turn_until(|bed| bed.remote().controller().state() == State::Ready);
        let waited = bed.now.since(sent_at);
        assert!(waited >= lag, "{is_cut_first}: {waited}");
    }
}

/// Reason for closing a connection.
#[derive(Clone, Copy, Debug)]
enum GivingUp {
    Reset,
    Deadline,
    FailFast,
}

/// A bed with a queue, whose network may retransmit data for the time `lag`.
fn bed_that_sends_again(lag: Span) -> Bed {
    let mut bed = Bed::new();
    bed.target.state().network.release_lag = lag;
    bed.target.state().network.copied_below = 4096;
    bed.call(Bed::options()).unwrap();
    bed.add_queue(32);
    bed
}

/// A bed with a write in flight that does not complete, and the memory of its data: the network may
/// retransmit the data for the time `lag`.
fn bed_with_a_write_that_lingers(lag: Span) -> (Bed, Segment) {
    let mut bed = bed_that_sends_again(lag);
    bed.target.state().is_idle = true;
    let place = bed.place(2, 8);
    assert!(bed.submit(0, Operation::Write, 0, &[place], 1));
    bed.turn_for(Span::from_ms(1));
    // The next connections have no lag.
    bed.target.state().network.release_lag = Span::default();
    (bed, place)
}

/// Which of the two threads detects a cut first, and how much later the other one does, has no effect on
/// the time before a write is sent again.
#[test]
fn silence_is_waited_for_whichever_thread_notices_the_end_first() {
    let TimeoutPolicy { detect, .. } = TimeoutPolicy::default();
    let quiet = quiet(detect, false);
    for front_is_ahead_by in [None, Some(Span::from_secs(3))] {
        let mut bed = Bed::with_queue(32);
        bed.turn_for(TimeoutPolicy::default().retry);
        bed.target.state().is_idle = true;
        let place = bed.place(0, 8);
        assert!(bed.submit(0, Operation::Write, 0, &[place], 1));
        bed.turn_for(Span::from_ms(1));
        bed.target.cut();
        bed.target.state().is_idle = false;
        let queues = std::mem::take(&mut bed.queues);
        bed.turn_for(front_is_ahead_by.unwrap_or_default());
        bed.queues = queues;
        bed.turn_queues();
        let silent_since = bed.now;
        bed.turn_until(|bed| !bed.completions.is_empty());
        let waited = bed.now.since(silent_since);
        assert!(waited >= quiet, "{front_is_ahead_by:?}: {waited}");
        assert_eq!(bed.completions[0].status, IoStatus::SUCCESS);
    }
}

#[test]
fn requests_fail_when_they_have_been_held_for_long_enough_and_go_on_when_it_comes_back() {
    let mut bed = Bed::with_queue(8);
    bed.target.state().is_idle = true;
    let place = bed.place(0, 1);
    (0..5).for_each(|token| assert!(bed.submit(0, Operation::Read, token, &[place], token)));
    bed.turn_for(Span::from_ms(1));
    bed.target.state().is_away = true;
    bed.target.cut();
    let begun = bed.now;
    bed.turn_for(Span::from_ms(10));
    assert!(!bed.submit(0, Operation::Read, 9, &[place], 9), "the request stays with its caller");
    bed.turn_until(|bed| bed.completions.len() == 5);
    let TimeoutPolicy { fail_fast, .. } = TimeoutPolicy::default();
    let waited = bed.now.since(begun);
    assert!((fail_fast..Span { ns: fail_fast.ns + 200_000_000 }).contains(&waited), "{waited}");
    assert!(bed.completions.iter().all(|completion| completion.status == IoStatus::PATH_ERROR));
    bed.completions.clear();
    assert_eq!(bed.run(Operation::Read, 0, &[place]), IoStatus::PATH_ERROR, "at once");
    assert!(bed.now.since(begun) < Span { ns: fail_fast.ns + 300_000_000 });
    bed.target.state().is_away = false;
    bed.target.state().is_idle = false;
    bed.turn_until(|bed| bed.events.contains(&Event::QueuePairResumed { id: 1 }));
    bed.turn_for(Span::from_ms(10));
    bed.exchange(1, 8, 1);
}

#[test]
fn a_peer_that_falls_silent_is_noticed_in_time() {
    let mut bed = Bed::with_queue(32);
    bed.exchange(0, 8, 0);
    for network in &bed.target.state().networks {
        network.inject_fault(LinkSide::Downstream, LinkFault::BlackHole);
    }
    let begun = bed.now;
    bed.turn_until(|bed| bed.remote().counts().lost == 1);
    let TimeoutPolicy { detect, .. } = TimeoutPolicy::default();
    assert!(bed.now.since(begun) <= Span { ns: detect.ns + 100_000_000 });
    assert_eq!(bed.remote().last_error().as_deref(), Some("a Keep Alive was not answered in time"));
    bed.turn_until(|bed| bed.events.contains(&Event::QueuePairResumed { id: 1 }));
    bed.exchange(1, 8, 1);
}

#[test]
fn a_peer_that_does_not_come_back_is_given_up_in_time_and_all_is_answered() {
    let mut bed = Bed::with_queue(32);
    let free = bed.free_bytes();
    bed.target.state().is_idle = true;
    let place = bed.place(0, 1);
    (0..10).for_each(|token| assert!(bed.submit(0, Operation::Read, token, &[place], token)));
    bed.turn_for(Span::from_ms(1));
    bed.target.state().is_away = true;
    bed.target.cut();
    let begun = bed.now;
    while bed.remote().is_usable() {
        bed.now = bed.now.after(Span::from_ms(20));
        bed.turn();
        assert!(bed.now.since(begun) < Span::from_secs(700), "{:?}", bed.events);
    }
    let TimeoutPolicy { give_up, retry, .. } = TimeoutPolicy::default();
    assert!(bed.now.since(begun) >= give_up, "not before its time");
    let tries = bed.remote().counts().attempts;
    assert!((500..=give_up.ns / retry.ns + 10).contains(&tries), "{tries}");
    assert_eq!(bed.remote().controller().state(), State::Removed);
    bed.turn_for(Span::from_ms(10));
    let mut tokens: Vec<u64> = bed.completions.iter().map(|completion| completion.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..10).collect::<Vec<_>>());
    assert_eq!(bed.run(Operation::Read, 0, &[place]), IoStatus::PATH_ERROR);
    assert_eq!(bed.target.connections(), 0);
    bed.queues.clear();
    bed.multipath = None;
    assert!(bed.free_bytes() > free, "rings and lists have come back");
}

/// As when a controller is restarted from the other side during a reset by the driver.
#[test]
fn a_peer_that_is_away_while_the_driver_resets_it_is_called_again() {
    let mut bed = Bed::with_queue(8);
    let now = bed.now;
    bed.remote().controller().reset(now).unwrap();
    bed.target.state().is_away = true;
    bed.turn_for(Span::from_secs(20));
    assert!(bed.remote().is_usable() && bed.remote().lost_since().is_some());
    bed.target.state().is_away = false;
    bed.turn_until(|bed| bed.events.contains(&Event::QueuePairResumed { id: 1 }));
    assert_eq!(bed.remote().lost_since(), None);
    bed.exchange(1, 8, 1);
}

/// It does not justify repeated resets of everything, least of all if it is what breaks the peer.
#[test]
fn a_request_that_is_never_answered_fails_after_a_few_resets_and_the_others_go_on() {
    let mut bed = Bed::with_queue(8);
    bed.target.state().is_idle = true;
    bed.target.state().mute = Some(tenmil_wire::AdminOpcode::Abort.code());
    let place = bed.place(0, 1);
    assert!(bed.submit(0, Operation::Read, 1, &[place], 1));
    let begun = bed.now;
    while bed.completions.is_empty() {
        bed.now = bed.now.after(Span::from_ms(5));
        bed.turn();
        assert!(bed.now.since(begun) < Span::from_secs(600), "it is repeated without end");
    }
    assert_eq!(bed.completions.remove(0).status, IoStatus::ABORTED_BY_HOST);
    let resets = bed.events.iter().filter(|event| **event == Event::Recovered).count();
    assert_eq!(resets, 2, "it was sent three times");
    bed.target.state().is_idle = false;
    bed.target.state().mute = None;
    bed.turn_until(|bed| bed.remote().controller().state() == State::Ready);
    bed.exchange(3, 8, 3);
}

/// Whatever was in its slot before, so that a controller can find it.
#[test]
fn an_abort_names_the_command_by_its_identifier_on_the_wire() {
    let mut bed = Bed::with_queue(8);
    for round in 0..20 {
        bed.exchange(round, 8, round);
    }
    bed.target.state().is_idle = true;
    let place = bed.place(0, 1);
    assert!(bed.submit(0, Operation::Read, 1, &[place], 1));
    bed.turn_until(|bed| !bed.target.state().aborted.is_empty());
    let state = bed.target.state();
    assert_eq!(state.aborted, state.unanswered);
    assert!(state.unanswered[0] > 8, "its slot was used before");
}

/// An address means nothing to a connection.
#[test]
fn a_raw_command_with_a_data_pointer_of_its_own_is_rejected() {
    let mut bed = Bed::new();
    let (_remote, mut queue_pair) = bed.raw_queue_pair(8);
    let command = tenmil_wire::Command::new(2).with_nsid(1).with_prp(4096, 0);
    let now = bed.now;
    queue_pair.queue().submit_raw(now, 7, command, &[], &[], None).unwrap();
    let mut completions = CompletionBatch::with_capacity(1);
    queue_pair.poll_raw(now, &mut completions);
    let completion = completions.as_slice()[0];
    assert_eq!((completion.token, completion.status), (7, IoStatus::INVALID_FIELD));
}

/// A reset of the controller for other reasons is no evidence against the requests in flight.
#[test]
fn a_request_outlives_any_number_of_resets_that_it_has_not_caused() {
    let mut bed = Bed::with_queue(8);
    bed.target.state().is_idle = true;
    let place = bed.place(0, 1);
    assert!(bed.submit(0, Operation::Read, 1, &[place], 1));
    for _ in 0..8 {
        bed.turn_for(Span::from_ms(1));
        bed.events.clear();
        let now = bed.now;
        bed.remote().controller().reset(now).unwrap();
        bed.turn_until(|bed| bed.events.contains(&Event::QueuePairResumed { id: 1 }));
    }
    assert_eq!(bed.completions, []);
    bed.target.state().is_idle = false;
    bed.turn_for(Span::from_ms(1));
    bed.events.clear();
    let now = bed.now;
    bed.remote().controller().reset(now).unwrap();
    bed.turn_until(|bed| !bed.completions.is_empty());
    assert_eq!(bed.completions[0].status, IoStatus::SUCCESS);
}

/// The cause of repeated disconnects is found among the requests that were in flight with it.
#[test]
fn who_breaks_the_connection_fails_and_its_neighbours_do_not() {
    let mut bed = Bed::with_queue(8);
    bed.target.state().poison = Some(5);
    let place = bed.place(0, 1);
    for lba in 3..8 {
        assert!(bed.submit(0, Operation::Read, lba, &[place], lba));
    }
    bed.turn_until(|bed| bed.completions.len() == 5);
    for completion in &bed.completions {
        let is_guilty = completion.token == 5;
        let expected = if is_guilty { IoStatus::ABORTED_BY_HOST } else { IoStatus::SUCCESS };
        assert_eq!(completion.status, expected, "{completion:?}");
    }
    bed.completions.clear();
    bed.exchange(9, 8, 9);
}

/// Bytes transferred on each stream in a session of one write and one read.
fn lengths() -> Vec<(usize, LinkSide, u64)> {
    let bed = session(None);
    let state = bed.target.state();
    let each = state.networks.iter().enumerate().flat_map(|(number, network)| {
        [LinkSide::Upstream, LinkSide::Downstream]
            .map(|way| (number, way, network.is_data_available(way)))
    });
    each.collect()
}

/// A session with a fault on one stream: it does not connect, or everything succeeds in the end; in
/// either case no resources are left behind.
fn session(harm: Option<(usize, LinkSide, u64)>) -> Bed {
    let mut bed = Bed::new();
    let free = bed.free_bytes();
    bed.target.state().harm = harm;
    if bed.is_reached() {
        bed.add_queue(8);
        bed.exchange(3, 16, 3);
        bed.queues.clear();
        bed.turn_until(|bed| bed.remote().controller().state() == State::Ready);
        bed.shut_down();
    }
    bed.multipath = None;
    (0..3).for_each(|_| bed.turn());
    assert_eq!(bed.target.connections(), 0, "{harm:?}");
    assert_eq!(bed.free_bytes(), free, "{harm:?}");
    bed
}

/// Runs sessions that are cut at the bytes of each stream that `is_one` selects; returns their number.
fn cut_at(is_one: impl Fn(u64, u64) -> bool) -> u64 {
    let mut count = 0;
    for (number, way, len) in lengths() {
        for at in (0..len).filter(|at| is_one(*at, len)) {
            session(Some((number, way, at)));
            count += 1;
        }
    }
    count
}

#[test]
fn a_stream_that_is_cut_at_any_byte_leaves_nothing_behind() {
    // All of the first bytes, in which a connection is opened, and some of the others.
    let count = cut_at(|at, len| at < 300 || at % 61 == 0 || len - at < 100);
    assert!(count > 1500, "{count} cuts");
}

#[test]
#[ignore = "takes minutes: .ci/nightly runs it"]
fn a_stream_that_is_cut_at_every_single_byte_leaves_nothing_behind() {
    let (count, bytes) = (cut_at(|_, _| true), lengths().iter().map(|(.., len)| len).sum());
    assert_eq!(count, bytes);
}

/// The reset goes over the intact admin connection, and the controller confirms that it has stopped.
#[test]
fn a_queue_that_is_lost_alone_is_made_again_without_waiting_for_silence() {
    let mut bed = Bed::with_queue(32);
    bed.turn_for(TimeoutPolicy::default().retry);
    bed.target.state().is_idle = true;
    let place = bed.place(0, 8);
    assert!(bed.submit(0, Operation::Write, 0, &[place], 1));
    bed.turn_for(Span::from_ms(1));
    bed.target.state().networks[1].cut_links();
    bed.target.state().is_idle = false;
    let cut_at = bed.now;
    bed.turn_until(|bed| !bed.completions.is_empty());
    assert!(bed.now.since(cut_at) < Span::from_ms(300), "{}", bed.now.since(cut_at));
    assert_eq!(bed.completions[0].status, IoStatus::SUCCESS);
    bed.exchange(3, 8, 3);
}

/// A closed socket still delivers its buffered data, except commands that change a block: these are
/// discarded.
#[test]
fn what_changes_a_block_and_lies_in_the_socket_is_thrown_away_with_the_connection() {
    for (operation, is_delivered) in [(Operation::WriteZeroes, false), (Operation::Read, true)] {
        let mut bed = Bed::new();
        let identity = bed.target.state().identity.clone().with(|it| it.oncs(8));
        bed.target.state().identity = identity;
        bed.call(Bed::options()).unwrap();
        bed.add_queue(32);
        let network = bed.target.state().networks[1].clone();
        network.inject_fault(LinkSide::Upstream, LinkFault::Freeze(Span::from_ms(1)));
        let place = bed.place(0, 8);
        assert!(bed.submit(0, operation, 0, &[place], 1));
        let now = bed.now;
        bed.remote().controller().reset(now).unwrap();
        bed.turn_for(Span::from_us(500));
        assert_eq!(bed.target.state().heard, 0, "it lies there");
        bed.target.state().is_idle = true;
        bed.turn_for(Span::from_ms(2));
        assert_eq!(bed.target.state().heard > 0, is_delivered, "{operation:?}");
    }
}

/// Its controller completes Keep Alive all the while. Only one of several connections stalls.
#[test]
fn stalled_connection_of_a_queue_is_noticed_in_time_though_the_controller_lives() {
    for count in [1, 5] {
        let mut bed = Bed::with_queue(32);
        bed.exchange(0, 8, 0);
        bed.target.state().networks[1].inject_fault(LinkSide::Downstream, LinkFault::BlackHole);
        let begun = bed.now;
        let place = bed.place(0, 8);
        (0..count).for_each(|token| assert!(bed.submit(0, Operation::Read, 0, &[place], token)));
        bed.turn_until(|bed| bed.remote().counts().lost == 1);
        let (waited, TimeoutPolicy { detect, .. }) =
            (bed.now.since(begun), TimeoutPolicy::default());
        assert!(waited <= Span { ns: detect.ns + 100_000_000 }, "{waited}");
        let why = bed.remote().last_error().unwrap();
        assert!(why.starts_with("nothing came over the connection of a queue"), "{why}");
        bed.turn_until(|bed| bed.completions.len() == usize::try_from(count).unwrap());
        assert!(bed.completions.iter().all(|completion| completion.status.is_success()));
        assert!(bed.now.since(begun) < Span::from_secs(7), "{}", bed.now.since(begun));
    }
}

/// Within its permitted time.
#[test]
fn slow_device_is_not_taken_for_a_stalled_connection() {
    for count in [1, 20] {
        let mut bed = Bed::with_queue(32);
        bed.target.state().is_idle = true;
        let place = bed.place(0, 8);
        (0..count).for_each(|token| assert!(bed.submit(0, Operation::Read, 0, &[place], token)));
        bed.turn_for(Span::from_secs(28));
        assert_eq!((bed.remote().counts().lost, bed.completions.len()), (0, 0));
        // Later requests succeed.
        bed.target.state().is_idle = false;
        bed.exchange(3, 8, 3);
    }
}

/// The peer answers commands and leaves the probe unanswered: there is no second one beside it.
#[test]
fn unanswered_probe_serves_for_the_next_silence_and_ends_the_connection() {
    let mut bed = Bed::with_queue(32);
    bed.target.state().ignores_probes = true;
    let place = bed.place(0, 8);
    let read = |bed: &mut Bed, token| {
        assert!(bed.submit(0, Operation::Read, 0, &[place], token));
        bed.turn_for(Span::from_us(500));
    };
    bed.target.state().is_idle = true;
    read(&mut bed, 1);
    // Completed after the probe, which is sent between a third and two thirds of `detect`.
    bed.target.state().is_idle = false;
    bed.target.state().delay = Some(Span::from_secs(4));
    read(&mut bed, 2);
    bed.turn_until(|bed| bed.completions.len() == 1);
    let begun = bed.now;
    bed.turn_until(|bed| bed.remote().counts().lost == 1);
    let (waited, detect) = (bed.now.since(begun), TimeoutPolicy::default().detect);
    assert!(waited <= Span { ns: detect.ns + 100_000_000 }, "{waited}");
}

/// There is no free entry for a probe.
#[test]
fn stalled_connection_of_a_full_queue_is_noticed_when_requests_may_be_held_no_longer() {
    let mut bed = Bed::with_queue(8);
    bed.exchange(0, 8, 0);
    bed.target.state().networks[1].inject_fault(LinkSide::Downstream, LinkFault::BlackHole);
    let begun = bed.now;
    let place = bed.place(0, 8);
    let fits = |bed: &mut Bed, token| bed.submit(0, Operation::Read, 0, &[place], token);
    let count = (0..32).take_while(|token| fits(&mut bed, *token)).count();
    bed.turn_until(|bed| bed.remote().counts().lost == 1);
    let (waited, TimeoutPolicy { detect, fail_fast, .. }) =
        (bed.now.since(begun), TimeoutPolicy::default());
    assert!(waited <= Span { ns: detect.ns + fail_fast.ns }, "{waited}");
    bed.turn_until(|bed| bed.completions.len() == count);
}

/// Like common discovery controllers: Connect carried a timeout, so it counts.
#[test]
fn controller_without_a_keep_alive_granularity_is_told_that_its_host_lives() {
    let mut bed = Bed::new();
    let identity = bed.target.state().identity.clone().with(|it| it.kas(0));
    bed.target.state().identity = identity;
    bed.call(Bed::options()).unwrap();
    bed.add_queue(8);
    let before = bed.target.state().keep_alives;
    bed.turn_for(Span::from_secs(40));
    bed.exchange(1, 8, 1);
    assert_eq!(bed.remote().counts().lost, 0, "{:?}", bed.remote().last_error());
    // One in each half of the 5 s that Connect was told, and no more.
    let sent = bed.target.state().keep_alives - before;
    assert!((15..=17).contains(&sent), "{sent}");
}
