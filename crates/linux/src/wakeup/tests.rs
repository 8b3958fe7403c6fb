//! Sleeping and waking on the real kernel, with and without the optional system calls.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use tenmil_base::Span;

use super::{AsymmetricBarrier, COALESCE_DELAY, Sleeper};
use crate::clock::kernel_ns;
use crate::named_thread::NamedThread;

const LONG: Span = Span::from_secs(20);
const NOW: Span = Span { ns: 0 };

/// One sleeper of each kind that this machine supports.
fn test_sleepers() -> [Sleeper; 3] {
    let coarse = Sleeper::new().unwrap();
    coarse.sources.prompt.use_millisecond_timeouts();
    [Sleeper::new().unwrap(), Sleeper::with_fences().unwrap(), coarse]
}

/// Number of writes to the eventfd since the last call.
fn eventfd_writes(sleeper: &Sleeper) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(&sleeper.shared.event, &mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(errno) => {
            assert_eq!(errno, Errno::AGAIN);
            0
        }
    }
}

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn signal_eventfd(event: &OwnedFd) {
    rustix::io::write(event, &1_u64.to_ne_bytes()).unwrap();
}

fn elapsed_ns<R>(body: impl FnOnce() -> R) -> (R, Span) {
    let begun = kernel_ns();
    let result = body();
    (result, Span { ns: kernel_ns() - begun })
}

#[test]
fn pause_ends_with_a_notification_and_not_with_a_descriptor() {
    for mut sleeper in test_sleepers() {
        let (waker, event) = (sleeper.notifier(), new_eventfd());
        sleeper.sources().add_source(&event, 7).unwrap();
        signal_eventfd(&event);
        for _ in 0..3 {
            sleeper.announce_sleep_without_descriptors();
            let (rang, rested) = elapsed_ns(|| sleeper.sleep_without_descriptors(Span::from_ms(2)));
            assert!(
                !rang && rested >= Span::from_ms(2),
                "{rested}: neither a descriptor nor an old ring"
            );
            sleeper.announce_sleep_without_descriptors();
            waker.notify();
            let (rang, rested) = elapsed_ns(|| sleeper.sleep_without_descriptors(LONG));
            assert!(rang && rested < LONG);
            // A notification that ended a sleep is stale afterwards.
            sleeper.announce_sleep();
            waker.notify();
            assert!(sleeper.sleep_until_ready(LONG, &mut Vec::new()));
        }
    }
}

#[test]
fn notification_of_an_awake_sleeper_makes_no_system_call() {
    for mut sleeper in test_sleepers() {
        let waker = sleeper.notifier();
        waker.notify();
        assert_eq!(eventfd_writes(&sleeper), 0, "not yet announced");
        sleeper.announce_sleep();
        sleeper.cancel_sleep();
        waker.notify();
        assert_eq!(eventfd_writes(&sleeper), 0, "taken back");
        sleeper.announce_sleep();
        sleeper.sleep_until_ready(NOW, &mut Vec::new());
        waker.notify();
        assert_eq!(eventfd_writes(&sleeper), 0, "awake again");
    }
}

#[test]
fn sleep_is_ended_by_one_write_for_any_number_of_notifications() {
    for mut sleeper in test_sleepers() {
        let (waker, other) = (sleeper.notifier(), sleeper.notifier().clone());
        for _ in 0..3 {
            sleeper.announce_sleep();
            waker.notify();
            other.notify();
            waker.notify();
            assert_eq!(eventfd_writes(&sleeper), 1);
        }
    }
}

#[test]
fn every_sleep_can_be_ended_although_the_counter_is_never_read() {
    for mut sleeper in test_sleepers() {
        let waker = sleeper.notifier();
        for _ in 0..100 {
            sleeper.announce_sleep();
            waker.notify();
            assert!(sleeper.sleep_until_ready(LONG, &mut Vec::new()));
            assert!(!sleeper.sleep_until_ready(NOW, &mut Vec::new()), "one ring ends one sleep");
        }
        assert_eq!(eventfd_writes(&sleeper), 100);
    }
}

#[test]
fn notification_before_a_cancelled_sleep_ends_the_next_sleep() {
    for mut sleeper in test_sleepers() {
        sleeper.announce_sleep();
        sleeper.notifier().notify();
        sleeper.cancel_sleep();
        sleeper.announce_sleep();
        assert!(sleeper.sleep_until_ready(LONG, &mut Vec::new()));
    }
}

#[test]
fn notification_from_another_thread_ends_a_sleep() {
    for mut sleeper in test_sleepers() {
        let waker = sleeper.notifier();
        sleeper.announce_sleep();
        let ringer = NamedThread::spawn("ringer", None, move |_| waker.notify()).unwrap();
        let (rang, slept) = elapsed_ns(|| sleeper.sleep_until_ready(LONG, &mut Vec::new()));
        assert!(rang && slept < LONG);
        ringer.join();
    }
}

#[test]
fn notifier_outlives_its_sleeper() {
    let mut sleeper = Sleeper::new().unwrap();
    let waker = sleeper.notifier();
    sleeper.announce_sleep();
    drop(sleeper);
    waker.notify();
}

#[test]
fn sleep_lasts_until_its_deadline() {
    for mut sleeper in test_sleepers() {
        for at_most in [Span::from_us(300), Span::from_us(1_500), Span::from_ms(3)] {
            sleeper.announce_sleep();
            let (rang, slept) = elapsed_ns(|| sleeper.sleep_until_ready(at_most, &mut Vec::new()));
            assert!(!rang);
            assert!(slept >= at_most, "{slept} of {at_most}");
        }
    }
}

#[test]
fn unlimited_sleep_is_allowed() {
    for mut sleeper in test_sleepers() {
        sleeper.announce_sleep();
        sleeper.notifier().notify();
        assert!(sleeper.sleep_until_ready(Span { ns: u64::MAX }, &mut Vec::new()));
    }
}

#[test]
fn ready_descriptors_end_a_sleep_and_are_reported() {
    for mut sleeper in test_sleepers() {
        let sources = sleeper.sources();
        let events = [new_eventfd(), new_eventfd(), new_eventfd()];
        for (token, event) in (10..).zip(&events) {
            sources.add_source(event, token).unwrap();
        }
        let mut ready = vec![7];
        sleeper.announce_sleep();
        assert!(!sleeper.sleep_until_ready(NOW, &mut ready));
        assert_eq!(ready, [7]);

        signal_eventfd(&events[0]);
        signal_eventfd(&events[2]);
        for _ in 0..2 {
            ready.clear();
            sleeper.announce_sleep();
            assert!(!sleeper.sleep_until_ready(LONG, &mut ready), "no bell");
            ready.sort_unstable();
            assert_eq!(ready, [10, 12], "for as long as they are not read");
        }
        sources.remove_source(&events[0]).unwrap();
        ready.clear();
        sleeper.announce_sleep();
        sleeper.notifier().notify();
        assert!(sleeper.sleep_until_ready(LONG, &mut ready), "the bell as well");
        assert_eq!(ready, [12]);
    }
}

#[test]
fn edge_triggered_descriptor_ends_a_sleep_once_per_change() {
    for mut sleeper in test_sleepers() {
        let (plain, inner) = (new_eventfd(), new_eventfd());
        let nest = crate::poll_set::PollSet::new().unwrap();
        let readable = crate::poll_set::Interest { readable: true, writable: false };
        nest.add(&inner, 0, readable).unwrap();
        let sources = sleeper.sources();
        sources.add_source(&plain, 1).unwrap();
        sources.add_source(&nest, 2).unwrap();
        let mut slept = |at_most| {
            let mut ready = Vec::new();
            sleeper.announce_sleep();
            sleeper.sleep_until_ready(at_most, &mut ready);
            ready.sort_unstable();
            ready
        };
        signal_eventfd(&plain);
        signal_eventfd(&inner);
        assert_eq!(slept(LONG), [1, 2]);
        sources.set_edge_triggered(&plain, 1).unwrap();
        sources.set_edge_triggered(&nest, 2).unwrap();
        assert_eq!(slept(LONG), [1, 2], "once for what it was readable for");
        for _ in 0..3 {
            assert_eq!(slept(NOW), [], "they have been readable all the time");
            signal_eventfd(&plain);
            assert_eq!(slept(LONG), [1]);
            signal_eventfd(&inner);
            assert_eq!(slept(LONG), [2], "through the set that it is in");
        }
        sources.set_level_triggered(&plain, 1).unwrap();
        assert_eq!((slept(LONG), slept(LONG)), (vec![1], vec![1]));
        sources.set_level_triggered(&nest, 2).unwrap();
        assert_eq!((slept(LONG), slept(LONG)), (vec![1, 2], vec![1, 2]));
    }
}

#[test]
fn more_ready_descriptors_than_a_wait_reports_are_all_reported() {
    for mut sleeper in test_sleepers() {
        let events: Vec<_> = (0..100).map(|_| new_eventfd()).collect();
        for (token, event) in (0..).zip(&events) {
            sleeper.sources().add_source(event, token).unwrap();
            signal_eventfd(event);
        }
        let mut ready = Vec::new();
        for _ in 0..4 {
            sleeper.sleep_until_ready(LONG, &mut ready);
        }
        assert_eq!(ready.iter().collect::<BTreeSet<_>>().len(), events.len());
    }
}

fn read_eventfd(event: &OwnedFd) {
    rustix::io::read(event, &mut [0; 8]).unwrap();
}

/// Sleeps, and returns what ended the sleep and its duration.
fn sleep_briefly(sleeper: &mut Sleeper, at_most: Span) -> (Vec<u64>, Span) {
    let mut ready = Vec::new();
    sleeper.announce_sleep();
    let (_, slept) = elapsed_ns(|| sleeper.sleep_until_ready(at_most, &mut ready));
    ready.sort_unstable();
    (ready, slept)
}

#[test]
fn coalesced_source_ends_a_sleep_at_once_after_a_quiet_period() {
    for mut sleeper in test_sleepers() {
        let sources = sleeper.sources();
        let events = [new_eventfd(), new_eventfd()];
        for (token, event) in (1..).zip(&events) {
            sources.add_source(event, token).unwrap();
            sources.set_coalesced(event, token).unwrap();
        }
        // On a busy machine single sleeps may be long, but not all of them.
        let mut shortest = LONG;
        for _ in 0..10 {
            signal_eventfd(&events[0]);
            let (ready, slept) = sleep_briefly(&mut sleeper, LONG);
            assert_eq!(ready, [1]);
            shortest = shortest.min(slept);
            read_eventfd(&events[0]);

            signal_eventfd(&events[1]);
            let (ready, slept) = sleep_briefly(&mut sleeper, LONG);
            assert_eq!(ready, [2]);
            assert!(slept >= COALESCE_DELAY, "{slept}: it came right after another one");
            read_eventfd(&events[1]);

            let whole = Span { ns: COALESCE_DELAY.ns * 2 };
            let (ready, slept) = sleep_briefly(&mut sleeper, whole);
            assert_eq!(ready, []);
            assert!(slept >= whole, "{slept}: nothing has come");
        }
        assert!(shortest < COALESCE_DELAY, "{shortest}");
    }
}

#[test]
fn coalesced_source_is_reported_with_other_events_and_can_be_made_prompt() {
    for mut sleeper in test_sleepers() {
        let sources = sleeper.sources();
        let events = [new_eventfd(), new_eventfd(), new_eventfd()];
        for (token, event) in (1..).zip(&events) {
            sources.add_source(event, token).unwrap();
        }
        sources.set_coalesced(&events[0], 1).unwrap();
        sources.set_coalesced(&events[1], 2).unwrap();
        let mut shortest = LONG;
        for _ in 0..10 {
            signal_eventfd(&events[0]);
            assert_eq!(sleep_briefly(&mut sleeper, LONG).0, [1]);
            read_eventfd(&events[0]);
            signal_eventfd(&events[1]);
            signal_eventfd(&events[2]);
            let (ready, slept) = sleep_briefly(&mut sleeper, LONG);
            assert_eq!(ready, [2, 3]);
            shortest = shortest.min(slept);
            read_eventfd(&events[2]);
            let mut ready = Vec::new();
            sleeper.poll_ready(&mut ready);
            assert_eq!(ready, [2], "and by a look");
            read_eventfd(&events[1]);
        }
        assert!(shortest < COALESCE_DELAY, "{shortest}");

        sources.set_prompt(&events[1], 2).unwrap();
        shortest = LONG;
        for _ in 0..10 {
            signal_eventfd(&events[0]);
            assert_eq!(sleep_briefly(&mut sleeper, LONG).0, [1]);
            read_eventfd(&events[0]);
            signal_eventfd(&events[1]);
            let (ready, slept) = sleep_briefly(&mut sleeper, LONG);
            assert_eq!(ready, [2]);
            shortest = shortest.min(slept);
            read_eventfd(&events[1]);
        }
        assert!(shortest < COALESCE_DELAY, "{shortest}");
        sources.remove_source(&events[1]).unwrap();
        assert!(sources.set_prompt(&events[1], 2).is_err(), "it is not among those that linger");
    }
}

#[test]
fn more_coalesced_sources_than_one_wait_reports_are_all_reported() {
    for mut sleeper in test_sleepers() {
        let events: Vec<_> = (0..100).map(|_| new_eventfd()).collect();
        for (token, event) in (0..).zip(&events) {
            sleeper.sources().add_source(event, token).unwrap();
            sleeper.sources().set_coalesced(event, token).unwrap();
            signal_eventfd(event);
        }
        let mut ready = Vec::new();
        for _ in 0..4 {
            sleeper.sleep_until_ready(LONG, &mut ready);
        }
        assert_eq!(ready.iter().collect::<BTreeSet<_>>().len(), events.len());
    }
}

#[test]
fn reserved_tokens_are_rejected() {
    let sleeper = Sleeper::new().unwrap();
    for token in [u64::MAX, u64::MAX - 1] {
        let refused = sleeper.sources().add_source(new_eventfd(), token).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput);
    }
    let twice = new_eventfd();
    sleeper.sources().add_source(&twice, 1).unwrap();
    assert!(sleeper.sources().add_source(&twice, 2).is_err());
    sleeper.sources().remove_source(&twice).unwrap();
    assert!(sleeper.sources().remove_source(&twice).is_err());
}

#[test]
fn fallback_works_without_the_newer_system_calls() {
    let denied = || {
        let mut granted = Sleeper::new().unwrap();
        if let Err(errno) = filter::deny_syscalls(&[libc::SYS_epoll_pwait2, libc::SYS_membarrier]) {
            println!("skipped: system calls cannot be denied here ({errno})");
            return;
        }
        let mut ready = Vec::new();
        let mut sleeper = Sleeper::new().unwrap();
        assert_eq!(sleeper.barrier(), AsymmetricBarrier::FullFences);
        let at_most = Span::from_us(1_500);
        let (rang, slept) = elapsed_ns(|| sleeper.sleep_until_ready(at_most, &mut ready));
        assert!(!rang && slept >= at_most);
        sleeper.announce_sleep();
        sleeper.notifier().notify();
        assert!(sleeper.sleep_until_ready(LONG, &mut ready));

        if granted.barrier() == AsymmetricBarrier::Expedited {
            granted.announce_sleep();
            let (rang, slept) = elapsed_ns(|| granted.sleep_until_ready(LONG, &mut ready));
            assert!(!rang && slept < LONG, "without a barrier no sleep is long");
        }
    };
    // The filter belongs to the thread and ends with it.
    NamedThread::spawn("denied", None, move |_| denied()).unwrap().join();
}

mod filter {
    use std::io;

    use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, sock_filter, sock_fprog};

    /// Makes the kernel answer ENOSYS to these system calls of the current thread, permanently.
    pub(super) fn deny_syscalls(calls: &[libc::c_long]) -> io::Result<()> {
        let statement = |code: u32, k: u32, jt: u8| sock_filter {
            code: u16::try_from(code).unwrap(),
            jt,
            jf: 0,
            k,
        };
        let enosys = libc::SECCOMP_RET_ERRNO | u32::try_from(libc::ENOSYS).unwrap();
        // The system call number is the first word of the filter's input.
        let mut program = vec![statement(BPF_LD | BPF_W | BPF_ABS, 0, 0)];
        for (index, call) in calls.iter().enumerate() {
            let to_the_refusal = u8::try_from(calls.len() - index).unwrap();
            let number = u32::try_from(*call).unwrap();
            program.push(statement(BPF_JMP | BPF_JEQ | BPF_K, number, to_the_refusal));
        }
        program.push(statement(BPF_RET | BPF_K, libc::SECCOMP_RET_ALLOW, 0));
        program.push(statement(BPF_RET | BPF_K, enosys, 0));
        let len = u16::try_from(program.len()).unwrap();
        let program = sock_fprog { len, filter: program.as_mut_ptr() };
        rustix::thread::set_no_new_privs(true)?;
        // SAFETY: the program and its instructions outlive the call; the kernel copies and checks
        // them.
        let set = unsafe {
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
        };
        if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}
