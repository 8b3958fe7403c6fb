//! A device with a single path: it is the end of the device if its controller is gone, and otherwise a path
//! like one of several.

use tenmil_base::{
    ChannelWakeup, CompletionBatch, ErrorCategory, IoChannel, IoStatus, Operation, Span,
};
use tenmil_wire::fabrics::InvalidParameter;
use tenmil_wire::log::ana::AnaState;
use tenmil_wire::{Completion, Status};

use super::simulated_time::SimulatedTime;
use super::single_path_host::SinglePathHost;
use crate::multipath::{FabricsChannel, PathAnaState, PathEvent};
use crate::timeout_policy::TimeoutPolicy;

impl SinglePathHost {
    /// Adds a channel that is not connected yet.
    fn open_channel(&mut self) {
        let limits = self.queues[0].limits().clone();
        let (_, channel) = self.multipath().open_channel(limits);
        self.queues.push(channel);
    }

    /// The connection is lost, and the target can be reached no more.
    fn lose_connection(&mut self) {
        self.events.clear();
        self.path_events.clear();
        self.target.state().refuses_connections = true;
        self.target.cut();
        self.run_until(|host| host.multipath().down_since().is_some());
    }

    fn accept_connections(&mut self) {
        self.target.state().refuses_connections = false;
    }

    fn is_removed(&self) -> bool {
        self.path_events.iter().any(|event| matches!(event, PathEvent::Removed { .. }))
    }

    /// Why the path was lost, as often as that was reported.
    fn disconnect_reasons(&self) -> Vec<&str> {
        let events = self.path_events.iter();
        let disconnect_reasons = events.filter_map(|event| match event {
            PathEvent::Down { why, .. } => Some(why.as_str()),
            _ => None,
        });
        disconnect_reasons.collect()
    }
}

/// A target that comes back later than the ctrl-loss timeout has another device.
#[test]
fn device_whose_only_path_was_removed_stays_lost() {
    let mut host = SinglePathHost::new();
    let mut options = SinglePathHost::options();
    options.policy.give_up = Span::from_secs(20);
    host.connect(options).unwrap();
    host.add_queue(8);
    host.write_and_verify(0, 8, 0);
    host.lose_connection();
    let begun = host.now;
    host.run_until(|host| host.is_removed());
    let waited = host.now.since(begun);
    assert!((Span::from_secs(19)..Span::from_secs(21)).contains(&waited), "{waited}");
    let now = host.now;
    assert_eq!(host.multipath().failure_reason(now), Some("no listener"));
    let failed = host.multipath().path_counters().failed_connects(0);
    assert!((19..=21).contains(&failed), "{failed} attempts, one in a second");
    host.accept_connections();
    let place = host.buffer(0, 1);
    for _ in 0..10 {
        host.run_for(Span::from_secs(60));
        let begun = host.now;
        assert_eq!(host.run_request(Operation::Read, 0, &[place]), IoStatus::PATH_ERROR);
        assert!(host.now.since(begun) < Span::from_ms(10), "at once");
    }
    assert_eq!((host.multipath().ana_state(0), host.target.open_connection_count()), (None, 0));
    // So do channels that are opened afterwards.
    host.open_channel();
    host.queues.remove(0);
    assert_eq!(host.run_request(Operation::Read, 0, &[place]), IoStatus::PATH_ERROR);
}

/// It is not tried again, and what is held does not wait for the end of its time.
#[test]
fn permanent_connect_refusal_removes_the_device_at_once() {
    let mut host = SinglePathHost::with_queue(8);
    host.target.state().withholds_completions = true;
    let place = host.buffer(0, 1);
    assert!(host.submit(0, Operation::Read, 0, &[place], 1));
    host.run_for(Span::from_ms(1));
    host.target.state().refuses = Some(Status::CONNECT_INVALID_HOST.with_dnr());
    host.target.cut();
    let begun = host.now;
    host.run_until(|host| !host.completions.is_empty());
    assert_eq!(host.completions[0].status, IoStatus::PATH_ERROR);
    assert!(host.now.since(begun) < Span::from_secs(2), "{}", host.now.since(begun));
    let now = host.now;
    let why = host.multipath().failure_reason(now).map(str::to_owned).unwrap();
    assert!(why.contains("this host may not connect"), "{why}");
}

#[test]
fn namespace_without_a_name_is_the_same_after_a_reconnect() {
    let mut host = SinglePathHost::new();
    {
        let mut state = host.target.state();
        (state.nguid, state.is_shared) = (0, false);
    }
    host.connect(SinglePathHost::options()).unwrap();
    host.add_queue(8);
    for round in 0..3 {
        host.write_and_verify(0, 8, round);
        host.events.clear();
        host.target.cut();
        host.run_until(|host| host.multipath().down_since().is_some());
        host.run_until(|host| host.multipath().ana_state(0).is_some());
    }
    host.write_and_verify(0, 8, 3);
}

#[test]
fn missing_namespace_is_a_usage_error() {
    let mut host = SinglePathHost::new();
    host.target.state().has_namespace = false;
    let error = host.connect(SinglePathHost::options()).unwrap_err();
    let expected = "the target: no namespace 1 in nqn.2024-01.example:disk, expected one of: none";
    assert_eq!((error.category, error.text.as_str()), (ErrorCategory::Usage, expected));
}

/// A target that has just started has its subsystem before the namespaces in it.
#[test]
fn namespace_reattached_after_its_controller_is_used_at_once() {
    let mut host = SinglePathHost::new();
    let identity = host.target.state().identity.clone();
    host.target.state().identity = identity.with(|it| it.namespace_attribute_notices(true));
    host.connect(SinglePathHost::options()).unwrap();
    host.add_queue(8);
    host.write_and_verify(0, 8, 0);
    host.target.state().has_namespace = false;
    host.target.cut();
    host.run_until(|host| host.multipath().down_since().is_some());
    host.run_for(Span::from_secs(3));
    let place = host.buffer(0, 8);
    assert!(!host.submit(0, Operation::Read, 0, &[place], 1));
    {
        let mut state = host.target.state();
        (state.has_namespace, state.namespace_has_changed) = (true, true);
    }
    let begun = host.now;
    host.write_and_verify(0, 8, 1);
    assert!(host.now.since(begun) < Span::from_secs(1), "{}", host.now.since(begun));
}

/// The transport only knows that the connection has ended.
#[test]
fn invalid_data_of_the_peer_are_reported_as_the_cause_of_a_loss() {
    let mut host = SinglePathHost::with_queue(8);
    host.write_and_verify(0, 8, 0);
    host.path_events.clear();
    host.target.state().nguid = 9;
    host.target.cut();
    host.run_for(Span::from_secs(10));
    let [first, second] = host.disconnect_reasons()[..] else { panic!("{:?}", host.path_events) };
    assert_eq!(first, "the network was cut");
    assert!(second.contains("UUID, NGUID, EUI64 of namespace"), "{second}");
    host.target.state().nguid = 1;
    host.write_and_verify(0, 8, 1);
}

#[test]
fn channel_that_is_opened_during_an_outage_works_once_it_is_over() {
    let mut host = SinglePathHost::with_queue(8);
    host.write_and_verify(0, 8, 0);
    host.lose_connection();
    host.open_channel();
    // Nothing was submitted to the first one, which is not polled.
    host.queues.remove(0);
    let mut queue = host.queues.remove(0);
    let place = host.buffer(0, 8);
    let read = |now, queue: &mut FabricsChannel| {
        let taken = queue.submit(
            now,
            &[SinglePathHost::request(Operation::Read, 0, &[place], 1)],
            &[place],
        );
        queue.flush_submissions();
        taken == 1
    };
    host.run_for(Span::from_secs(10));
    assert!(!read(host.now, &mut queue));
    assert!(queue.wake_at() <= host.now.after(Span::from_ms(10)), "it asks again");
    host.accept_connections();
    let begun = host.now;
    host.run_until(|host| read(host.now, &mut queue));
    assert!(host.now.since(begun) < Span::from_secs(2), "{}", host.now.since(begun));
    host.queues.push(queue);
    host.run_until(|host| !host.completions.is_empty());
    assert_eq!(host.completions[0].status, IoStatus::SUCCESS);
}

#[test]
fn requests_to_an_unconnected_channel_fail_in_time_and_succeed_once_connected() {
    let TimeoutPolicy { fail_fast, .. } = TimeoutPolicy::default();
    let mut host = SinglePathHost::with_queue(8);
    host.lose_connection();
    host.open_channel();
    let mut queue = host.queues.remove(1);
    let place = host.buffer(0, 8);
    let requests = [1, 2].map(|token| SinglePathHost::request(Operation::Read, 0, &[place], token));
    let begun = host.now;
    let mut completions = CompletionBatch::with_capacity(4);
    host.run_until(|host| queue.submit(host.now, &requests, &[place]) > 0);
    let waited = host.now.since(begun);
    assert!((fail_fast..Span { ns: fail_fast.ns + 100_000_000 }).contains(&waited), "{waited}");
    assert!(queue.wake_at() <= host.now && queue.arm(), "there are answers");
    assert_eq!(queue.poll(host.now, &mut completions), 2);
    assert!(completions.drain().all(|completion| completion.status == IoStatus::PATH_ERROR));
    host.accept_connections();
    host.run_until(|host| host.multipath().ana_state(0).is_some());
    host.queues = vec![queue];
    assert_eq!(
        host.run_request(Operation::Read, 0, &[place]),
        IoStatus::SUCCESS,
        "the first one already"
    );
}

#[test]
fn channel_that_is_dropped_before_it_is_connected_is_not_connected() {
    let mut host = SinglePathHost::with_queue(8);
    host.lose_connection();
    host.open_channel();
    host.queues.pop();
    host.accept_connections();
    host.run_until(|host| host.multipath().ana_state(0).is_some());
    host.run_for(Span::from_secs(1));
    assert_eq!(host.target.open_connection_count(), 2);
}

/// While nothing else serves the queue, it is requested again.
#[test]
fn refused_queue_is_reported_and_requested_again() {
    let mut host = SinglePathHost::with_queue(8);
    let field = InvalidParameter(0).with(|dword| dword.ipo(42));
    let status = Status::CONNECT_INVALID_PARAMETERS.with_dnr();
    let refusal = Completion::new(0, status).with_dw0(field.0);
    host.target.state().refuses_queue = Some(refusal);
    let limits = host.queues[0].limits().clone();
    let (request, channel) = host.multipath().open_channel(limits);
    let begun = host.now;
    host.run_until(|host| host.multipath().queue_refusal(request).is_some());
    let why = host.multipath().queue_refusal(request).map(str::to_owned).unwrap();
    assert_eq!(why, "a queue was refused: Connect was refused: byte 42 of its command is refused");
    host.queues = vec![channel];
    host.write_and_verify(0, 8, 0);
    assert!(host.now.since(begun) < Span::from_secs(2), "{}", host.now.since(begun));
    assert_eq!(host.multipath().queue_refusal(request), None);
}

#[test]
fn requests_wait_for_an_accessible_state_of_the_only_path() {
    let mut host = SinglePathHost::new();
    host.target.state().ana = AnaState::Inaccessible;
    host.connect(SinglePathHost::options()).unwrap();
    host.add_queue(8);
    let place = host.buffer(0, 8);
    host.run_for(Span::from_secs(5));
    assert!(!host.submit(0, Operation::Write, 0, &[place], 1));
    {
        let mut state = host.target.state();
        (state.ana, state.ana_has_changed) = (AnaState::NonOptimized, true);
    }
    host.write_and_verify(0, 8, 1);
    assert_eq!(host.multipath().ana_state(0), Some(PathAnaState::NonOptimized));
}

/// As if it did not report ANA, until a command tells.
#[test]
fn path_whose_log_page_cannot_be_read_is_used() {
    for status in [Status::INVALID_LOG_PAGE.with_dnr(), Status::INTERNAL_ERROR] {
        let mut host = SinglePathHost::new();
        host.target.state().refuses_ana_log = Some(status);
        host.connect(SinglePathHost::options()).unwrap();
        host.add_queue(8);
        host.write_and_verify(0, 8, 0);
        host.target.state().ana = AnaState::Change;
        let place = host.buffer(0, 8);
        assert!(host.submit(0, Operation::Write, 0, &[place], 1));
        host.run_for(Span::from_secs(1));
        assert_eq!(host.completions, [], "{status}");
        host.target.state().ana = AnaState::Optimized;
        host.run_until(|host| !host.completions.is_empty());
        assert_eq!(host.completions[0].status, IoStatus::SUCCESS, "{status}");
    }
}
