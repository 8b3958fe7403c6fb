//! A device with a single path: it is the end of the device if its controller is gone, and otherwise a path
//! like one of several.

use tenmil_base::{
    ChannelWakeup, CompletionBatch, ErrorCategory, IoChannel, IoStatus, Operation, Span,
};
use tenmil_wire::fabrics::InvalidParameter;
use tenmil_wire::log::ana::AnaState;
use tenmil_wire::{Completion, Status};

use super::bed::Bed;
use super::turning::Turning;
use crate::multipath::{FabricsChannel, PathAnaState, PathEvent};
use crate::timeout_policy::TimeoutPolicy;

impl Bed {
    /// Adds a channel that is not connected yet.
    fn open_channel(&mut self) {
        let limits = self.queues[0].limits().clone();
        let (_, channel) = self.multipath().open_channel(limits);
        self.queues.push(channel);
    }

    /// The connection is lost, and the target can be reached no more.
    fn go_away(&mut self) {
        self.events.clear();
        self.path_events.clear();
        self.target.state().is_away = true;
        self.target.cut();
        self.turn_until(|bed| bed.multipath().down_since().is_some());
    }

    fn come_back(&mut self) {
        self.target.state().is_away = false;
    }

    fn is_removed(&self) -> bool {
        self.path_events.iter().any(|event| matches!(event, PathEvent::Removed { .. }))
    }

    /// Why the path was lost, as often as that was reported.
    fn reasons(&self) -> Vec<&str> {
        let events = self.path_events.iter();
        let reasons = events.filter_map(|event| match event {
            PathEvent::Down { why, .. } => Some(why.as_str()),
            _ => None,
        });
        reasons.collect()
    }
}

/// A target that comes back later than the ctrl-loss timeout has another device.
#[test]
fn device_whose_only_path_was_given_up_stays_lost() {
    let mut bed = Bed::new();
    let mut options = Bed::options();
    options.policy.give_up = Span::from_secs(20);
    bed.call(options).unwrap();
    bed.add_queue(8);
    bed.exchange(0, 8, 0);
    bed.go_away();
    let begun = bed.now;
    bed.turn_until(|bed| bed.is_removed());
    let waited = bed.now.since(begun);
    assert!((Span::from_secs(19)..Span::from_secs(21)).contains(&waited), "{waited}");
    let now = bed.now;
    assert_eq!(bed.multipath().failure(now), Some("no listener"));
    bed.come_back();
    let place = bed.place(0, 1);
    for _ in 0..10 {
        bed.turn_for(Span::from_secs(60));
        let begun = bed.now;
        assert_eq!(bed.run(Operation::Read, 0, &[place]), IoStatus::PATH_ERROR);
        assert!(bed.now.since(begun) < Span::from_ms(10), "at once");
    }
    assert_eq!((bed.multipath().access(0), bed.target.connections()), (None, 0));
    // So do channels that are opened afterwards.
    bed.open_channel();
    bed.queues.remove(0);
    assert_eq!(bed.run(Operation::Read, 0, &[place]), IoStatus::PATH_ERROR);
}

/// It is not tried again, and what is held does not wait for the end of its time.
#[test]
fn refusal_for_good_ends_the_device_at_once() {
    let mut bed = Bed::with_queue(8);
    bed.target.state().is_idle = true;
    let place = bed.place(0, 1);
    assert!(bed.submit(0, Operation::Read, 0, &[place], 1));
    bed.turn_for(Span::from_ms(1));
    bed.target.state().refuses = Some(Status::CONNECT_INVALID_HOST.with_dnr());
    bed.target.cut();
    let begun = bed.now;
    bed.turn_until(|bed| !bed.completions.is_empty());
    assert_eq!(bed.completions[0].status, IoStatus::PATH_ERROR);
    assert!(bed.now.since(begun) < Span::from_secs(2), "{}", bed.now.since(begun));
    let now = bed.now;
    let why = bed.multipath().failure(now).map(str::to_owned).unwrap();
    assert!(why.contains("this host may not connect"), "{why}");
}

#[test]
fn namespace_without_a_name_is_the_same_after_a_reconnect() {
    let mut bed = Bed::new();
    {
        let mut state = bed.target.state();
        (state.nguid, state.is_shared) = (0, false);
    }
    bed.call(Bed::options()).unwrap();
    bed.add_queue(8);
    for round in 0..3 {
        bed.exchange(0, 8, round);
        bed.events.clear();
        bed.target.cut();
        bed.turn_until(|bed| bed.multipath().down_since().is_some());
        bed.turn_until(|bed| bed.multipath().access(0).is_some());
    }
    bed.exchange(0, 8, 3);
}

#[test]
fn namespace_that_is_not_there_is_a_mistake_of_the_user() {
    let mut bed = Bed::new();
    bed.target.state().has_namespace = false;
    let error = bed.call(Bed::options()).unwrap_err();
    let expected = "the target: no namespace 1 in nqn.2024-01.example:disk, expected one of: none";
    assert_eq!((error.category, error.text.as_str()), (ErrorCategory::Usage, expected));
}

/// A target that has just started has its subsystem before the namespaces in it.
#[test]
fn namespace_that_comes_back_after_its_controller_is_used_as_soon_as_it_does() {
    let mut bed = Bed::new();
    let identity = bed.target.state().identity.clone();
    bed.target.state().identity = identity.with(|it| it.namespace_attribute_notices(true));
    bed.call(Bed::options()).unwrap();
    bed.add_queue(8);
    bed.exchange(0, 8, 0);
    bed.target.state().has_namespace = false;
    bed.target.cut();
    bed.turn_until(|bed| bed.multipath().down_since().is_some());
    bed.turn_for(Span::from_secs(3));
    let place = bed.place(0, 8);
    assert!(!bed.submit(0, Operation::Read, 0, &[place], 1));
    {
        let mut state = bed.target.state();
        (state.has_namespace, state.namespace_has_changed) = (true, true);
    }
    let begun = bed.now;
    bed.exchange(0, 8, 1);
    assert!(bed.now.since(begun) < Span::from_secs(1), "{}", bed.now.since(begun));
}

/// The transport only knows that the connection has ended.
#[test]
fn invalid_data_of_the_peer_are_reported_as_the_cause_of_a_loss() {
    let mut bed = Bed::with_queue(8);
    bed.exchange(0, 8, 0);
    bed.path_events.clear();
    bed.target.state().nguid = 9;
    bed.target.cut();
    bed.turn_for(Span::from_secs(10));
    let [first, second] = bed.reasons()[..] else { panic!("{:?}", bed.path_events) };
    assert_eq!(first, "the network was cut");
    assert!(second.contains("UUID, NGUID, EUI64 of namespace"), "{second}");
    bed.target.state().nguid = 1;
    bed.exchange(0, 8, 1);
}

#[test]
fn channel_that_is_opened_during_an_outage_works_once_it_is_over() {
    let mut bed = Bed::with_queue(8);
    bed.exchange(0, 8, 0);
    bed.go_away();
    bed.open_channel();
    // Nothing was submitted to the first one, which is not polled.
    bed.queues.remove(0);
    let mut queue = bed.queues.remove(0);
    let place = bed.place(0, 8);
    let read = |now, queue: &mut FabricsChannel| {
        let taken = queue.submit(now, &[Bed::request(Operation::Read, 0, &[place], 1)], &[place]);
        queue.flush();
        taken == 1
    };
    bed.turn_for(Span::from_secs(10));
    assert!(!read(bed.now, &mut queue));
    assert!(queue.wake_at() <= bed.now.after(Span::from_ms(10)), "it asks again");
    bed.come_back();
    let begun = bed.now;
    bed.turn_until(|bed| read(bed.now, &mut queue));
    assert!(bed.now.since(begun) < Span::from_secs(2), "{}", bed.now.since(begun));
    bed.queues.push(queue);
    bed.turn_until(|bed| !bed.completions.is_empty());
    assert_eq!(bed.completions[0].status, IoStatus::SUCCESS);
}

#[test]
fn requests_to_a_channel_that_is_not_connected_fail_in_time_and_go_on_when_it_is() {
    let TimeoutPolicy { fail_fast, .. } = TimeoutPolicy::default();
    let mut bed = Bed::with_queue(8);
    bed.go_away();
    bed.open_channel();
    let mut queue = bed.queues.remove(1);
    let place = bed.place(0, 8);
    let requests = [1, 2].map(|token| Bed::request(Operation::Read, 0, &[place], token));
    let begun = bed.now;
    let mut completions = CompletionBatch::with_capacity(4);
    bed.turn_until(|bed| queue.submit(bed.now, &requests, &[place]) > 0);
    let waited = bed.now.since(begun);
    assert!((fail_fast..Span { ns: fail_fast.ns + 100_000_000 }).contains(&waited), "{waited}");
    assert!(queue.wake_at() <= bed.now && queue.arm(), "there are answers");
    assert_eq!(queue.poll(bed.now, &mut completions), 2);
    assert!(completions.drain().all(|completion| completion.status == IoStatus::PATH_ERROR));
    bed.come_back();
    bed.turn_until(|bed| bed.multipath().access(0).is_some());
    bed.queues = vec![queue];
    assert_eq!(bed.run(Operation::Read, 0, &[place]), IoStatus::SUCCESS, "the first one already");
}

#[test]
fn channel_that_is_dropped_before_it_is_connected_is_not_connected() {
    let mut bed = Bed::with_queue(8);
    bed.go_away();
    bed.open_channel();
    bed.queues.pop();
    bed.come_back();
    bed.turn_until(|bed| bed.multipath().access(0).is_some());
    bed.turn_for(Span::from_secs(1));
    assert_eq!(bed.target.connections(), 2);
}

/// While nothing else serves the queue, it is requested again.
#[test]
fn refused_queue_is_reported_and_requested_again() {
    let mut bed = Bed::with_queue(8);
    let field = InvalidParameter(0).with(|dword| dword.ipo(42));
    let status = Status::CONNECT_INVALID_PARAMETERS.with_dnr();
    let refusal = Completion::new(0, status).with_dw0(field.0);
    bed.target.state().refuses_queue = Some(refusal);
    let limits = bed.queues[0].limits().clone();
    let (request, channel) = bed.multipath().open_channel(limits);
    let begun = bed.now;
    bed.turn_until(|bed| bed.multipath().refusal(request).is_some());
    let why = bed.multipath().refusal(request).map(str::to_owned).unwrap();
    assert_eq!(why, "a queue was refused: Connect was refused: byte 42 of its command is refused");
    bed.queues = vec![channel];
    bed.exchange(0, 8, 0);
    assert!(bed.now.since(begun) < Span::from_secs(2), "{}", bed.now.since(begun));
    assert_eq!(bed.multipath().refusal(request), None);
}

#[test]
fn requests_wait_for_an_accessible_state_of_the_only_path() {
    let mut bed = Bed::new();
    bed.target.state().ana = AnaState::Inaccessible;
    bed.call(Bed::options()).unwrap();
    bed.add_queue(8);
    let place = bed.place(0, 8);
    bed.turn_for(Span::from_secs(5));
    assert!(!bed.submit(0, Operation::Write, 0, &[place], 1));
    {
        let mut state = bed.target.state();
        (state.ana, state.ana_has_changed) = (AnaState::NonOptimized, true);
    }
    bed.exchange(0, 8, 1);
    assert_eq!(bed.multipath().access(0), Some(PathAnaState::NonOptimized));
}

/// As if it did not report ANA, until a command tells.
#[test]
fn path_whose_log_page_cannot_be_read_is_used() {
    for status in [Status::INVALID_LOG_PAGE.with_dnr(), Status::INTERNAL_ERROR] {
        let mut bed = Bed::new();
        bed.target.state().refuses_ana_log = Some(status);
        bed.call(Bed::options()).unwrap();
        bed.add_queue(8);
        bed.exchange(0, 8, 0);
        bed.target.state().ana = AnaState::Change;
        let place = bed.place(0, 8);
        assert!(bed.submit(0, Operation::Write, 0, &[place], 1));
        bed.turn_for(Span::from_secs(1));
        assert_eq!(bed.completions, [], "{status}");
        bed.target.state().ana = AnaState::Optimized;
        bed.turn_until(|bed| !bed.completions.is_empty());
        assert_eq!(bed.completions[0].status, IoStatus::SUCCESS, "{status}");
    }
}
