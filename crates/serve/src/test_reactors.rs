//! What the tests of vfio-user and vhost-user have in common: reactors, and waiting for an event.

use tenmil_base::Span;
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{PollMode, ReactorOptions, Reactors};

use crate::endpoint_event::EndpointEvent;

/// Longest wait of a test.
pub(crate) const TIME_LIMIT: Span = Span::from_secs(20);

/// Reactors on the first `count` CPUs.
pub(crate) fn reactors_on(count: usize, poll: PollMode, clock: &Clock) -> Reactors {
    let options = ReactorOptions { poll, ..ReactorOptions::default() };
    let cores: CpuList = CpuList::allowed_cpus().iter().take(count).collect();
    Reactors::start_on_cores(&cores, &options, clock).unwrap()
}

/// The next event of `next` for which `is_it` holds; others are dropped.
pub(crate) fn await_event(
    clock: &Clock,
    next: impl Fn() -> Option<EndpointEvent>,
    mut is_it: impl FnMut(&EndpointEvent) -> bool,
) -> EndpointEvent {
    let end = clock.now().after(TIME_LIMIT);
    loop {
        match next() {
            Some(event) if is_it(&event) => return event,
            Some(_) => {}
            None => tenmil_linux::named_thread::sleep(Span::from_us(100)),
        }
        assert!(clock.now() < end, "the event has not come in time");
    }
}
