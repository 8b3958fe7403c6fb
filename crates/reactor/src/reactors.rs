//! Running reactors: an OS thread for each core.

use std::sync::Arc;

use tenmil_base::Span;
use tenmil_linux::thread_state::OsThreadId;
use tenmil_linux::{Clock, CpuList, NamedThread, StopFlag, event_loop};

use crate::adaptive_spin::PollMode;
use crate::error::ReactorError;
use crate::event::Event;
use crate::flight_recorder;
use crate::light_thread::ThreadBuilder;
use crate::message::ThreadHandle;
use crate::reactor::{ReactorOptions, UnstartedReactors};
use crate::registry::{ReactorId, Registry, SpawnError, StatisticsSample};
use crate::time_accounting::TimeSource;
use crate::watchdog::{StallReport, run_watchdog};

/// Running reactors. Dropping them stops them: all threads end, after their pollers have detached
/// or a time limit.
#[derive(Debug)]
pub struct Reactors {
    directory: Arc<Registry>,
    threads: Vec<NamedThread<()>>,
    watchdog: Option<NamedThread<()>>,
    clock: Clock,
}

/// Running reactors, for observers.
#[derive(Clone, Debug)]
pub struct ReactorsHandle {
    /// Registry of the reactors and their light threads.
    pub directory: Arc<Registry>,
    /// Clock of the reactors.
    pub clock: Clock,
}

impl Reactors {
    /// Starts a reactor for each of `cores`, all of which must be available to this process, and
    /// pins it there if permitted. A failure to pin is recorded as an event.
    pub fn start_on_cores(
        cores: &CpuList,
        options: &ReactorOptions,
        clock: &Clock,
    ) -> Result<Self, ReactorError> {
        let allowed = CpuList::allowed_cpus();
        if cores.is_empty() {
            return Err(ReactorError::NoCores);
        }
        if let Some(core) = cores.iter().find(|core| !allowed.contains(*core)) {
            return Err(ReactorError::UnknownCore { core, allowed });
        }
        let cores: Vec<u32> = cores.iter().collect();
        let stopwatch = TimeSource::Clock(*clock);
        let assembly = UnstartedReactors::new(&cores, options, &stopwatch, clock.now())?;
        let UnstartedReactors { registry: directory, reactors } = assembly;
        let mut started = Self { directory, threads: Vec::new(), watchdog: None, clock: *clock };
        for ((mut reactor, mut sleeper), core) in reactors.into_iter().zip(cores) {
            let clock = *clock;
            let name = format!("reactor-{}", reactor.id());
            let id = reactor.id();
            let registry = Arc::clone(&started.directory);
            let body = move |_: &StopFlag| {
                registry.set_os_thread(id, OsThreadId::current());
                flight_recorder::start_recording(id, clock, &registry);
                drop(registry);
                event_loop::run_event_loop(&mut reactor, &clock, &mut sleeper)
            };
            let thread = NamedThread::spawn(&name, options.pin.then_some(core), body)
                .map_err(|error| ReactorError::from_io_error("start a reactor", &error))?;
            if let Err(error) = thread.pin_result() {
                let event = Event::NotPinned { reactor: id, error: error.to_string() };
                started.directory.record_event(clock.now(), event);
            }
            started.threads.push(thread);
        }
        Ok(started)
    }

    /// Starts a thread that observes the reactors. It reports an iteration that has lasted longer than
    /// `threshold`, once, as an event and to `tell`, which runs on that thread.
    pub fn start_watchdog(
        &mut self,
        threshold: Span,
        tell: impl Fn(&StallReport) + Send + 'static,
    ) -> Result<(), ReactorError> {
        let (directory, clock) = (Arc::clone(&self.directory), self.clock);
        directory.set_watchdog();
        let body = move |stop: &StopFlag| run_watchdog(stop, threshold, (&directory, clock), &tell);
        let thread = NamedThread::spawn("watchdog", None, body)
            .map_err(|error| ReactorError::from_io_error("start the watchdog", &error))?;
        self.watchdog = Some(thread);
        Ok(())
    }

    /// Registry of the reactors and threads.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.directory
    }

    /// Clock of the reactors.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Starts a light thread: [`Registry::spawn`].
    pub fn spawn(&self, plan: ThreadBuilder) -> Result<ThreadHandle, SpawnError> {
        self.directory.spawn(plan)
    }

    /// Changes the poll mode of all reactors: [`Registry::set_poll_mode_of_all`]. Fails if one was not
    /// reached; the others have changed.
    pub fn set_poll_mode(&self, mode: PollMode) -> Result<(), ReactorError> {
        let mut not_told = self.directory.set_poll_mode_of_all(mode)?;
        not_told.pop().map_or(Ok(()), |(_, why)| Err(why))
    }

    /// Samples all statistics.
    pub fn sample(&self) -> StatisticsSample {
        self.directory.sample_statistics(self.clock.now())
    }

    /// Stops the reactors: all threads end, after their pollers have detached or a time limit.
    ///
    /// # Panics
    ///
    /// If a reactor itself panicked, which no poller or message can cause.
    pub fn stop(mut self) {
        self.send_stop();
        self.threads.drain(..).for_each(NamedThread::join);
    }

    fn send_stop(&self) {
        for (reactor, thread) in self.directory.reactors().zip(&self.threads) {
            while self.stop_fails_with_full_inbox(reactor) && !thread.is_finished() {
                tenmil_linux::named_thread::yield_cpu();
            }
        }
    }

    /// Whether the reactor's inbox has no slot for the stop command.
    fn stop_fails_with_full_inbox(&self, reactor: ReactorId) -> bool {
        matches!(self.directory.stop_reactor(reactor), Err(ReactorError::InboxFull(_)))
    }
}

impl Drop for Reactors {
    fn drop(&mut self) {
        self.send_stop();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};
    use tenmil_base::{Instant, Random, Span};
    use tenmil_linux::{COALESCE_DELAY, Clock, CpuList};

    use super::Reactors;
    use crate::{
        Context, PollMode, PollResult, Poller, ReactorError, ReactorOptions, ThreadHandle,
    };
    use crate::{PollerBuilder, PollerWake, ThreadBuilder};

    /// Longer than anything here takes on the busiest machine.
    const TIME_LIMIT: Duration = Duration::from_secs(20);

    fn start_reactors(poll: PollMode) -> Reactors {
        let cores: CpuList = CpuList::allowed_cpus().iter().take(2).collect();
        let options = ReactorOptions { poll, ..ReactorOptions::default() };
        Reactors::start_on_cores(&cores, &options, &Clock::start()).unwrap()
    }

    /// Runs a closure on a thread and waits for its result.
    fn call_on_thread<T: Send + 'static>(
        to: &ThreadHandle,
        question: impl FnOnce(&mut Context<'_>) -> T + Send + 'static,
    ) -> T {
        let (send, answer): (_, Receiver<T>) = channel();
        assert!(to.send_closure(move |context| drop(send.send(question(context)))).is_ok());
        answer.recv_timeout(TIME_LIMIT).unwrap()
    }

    #[test]
    fn unavailable_cores_are_rejected_by_name() {
        let clock = Clock::on_kernel_clock();
        let options = ReactorOptions::default();
        let refused =
            Reactors::start_on_cores(&CpuList::from_iter([1023]), &options, &clock).unwrap_err();
        assert!(matches!(refused, ReactorError::UnknownCore { core: 1023, .. }), "{refused}");
        let refused = Reactors::start_on_cores(&CpuList::default(), &options, &clock).unwrap_err();
        assert_eq!(refused, ReactorError::NoCores);
    }

    #[test]
    fn message_wakes_a_sleeping_reactor_at_any_moment() {
        for poll in PollMode::ALL {
            let reactors = start_reactors(poll);
            let thread = reactors.spawn(ThreadBuilder::new("sleeper")).unwrap();
            let mut random = Random::new(7);
            for _ in 0..200 {
                let gap = Span { ns: 1 << random.below(20) };
                let end = reactors.clock().now().after(gap);
                while reactors.clock().now() < end {
                    std::hint::spin_loop();
                }
                call_on_thread(&thread, |_| ());
            }
            let sleeps: u64 = reactors.sample().reactors.iter().map(|one| one.sleeps).sum();
            assert_eq!(sleeps == 0, poll == PollMode::Always, "{poll}: {sleeps} sleeps");
            reactors.stop();
            assert!(thread.has_ended());
        }
    }

    /// Waits for notifications, and reports when they arrive.
    struct Bather {
        waker: Arc<OwnedFd>,
        heard: Sender<Instant>,
        lingers: Arc<AtomicBool>,
        clock: Clock,
    }

    impl Poller for Bather {
        fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
            let is_rung = rustix::io::read(&self.waker, &mut [0; 8]).is_ok();
            if is_rung {
                self.heard.send(self.clock.now()).unwrap();
            }
            PollResult::from_count(usize::from(is_rung))
        }

        fn may_park(&self) -> bool {
            true
        }

        fn may_coalesce_wakeups(&self) -> bool {
            self.lingers.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn coalesced_wakeup_is_late_and_uncoalesced_wakeup_is_immediate() {
        let reactors = start_reactors(PollMode::Adaptive);
        let home = reactors.registry().reactors().next().unwrap();
        let lingers = Arc::new(AtomicBool::new(true));
        let bathers = [0, 1].map(|_| {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            let waker: Arc<OwnedFd> = Arc::new(eventfd(0, flags).unwrap());
            let (heard, hears) = channel();
            let (lingers, clock) = (Arc::clone(&lingers), *reactors.clock());
            let woken_by = PollerWake::Descriptor(waker.try_clone().unwrap());
            let bather = Bather { waker: Arc::clone(&waker), heard, lingers, clock };
            let bather = PollerBuilder::polled_each_iteration("bather", woken_by, bather);
            reactors
                .spawn(ThreadBuilder::new("bather").on_reactor(home).add_poller(bather))
                .unwrap();
            (waker, hears)
        });
        // Time until the second notification is seen, soon after the first.
        let late = || {
            tenmil_linux::named_thread::sleep(Span::from_ms(50));
            let mut took = Span::default();
            for (waker, hears) in &bathers {
                let rung = reactors.clock().now();
                rustix::io::write(waker, &1_u64.to_ne_bytes()).unwrap();
                took = hears.recv_timeout(TIME_LIMIT).unwrap().since(rung);
                // It falls asleep.
                tenmil_linux::named_thread::sleep(Span::from_ms(3));
            }
            took
        };
        late();
        let longest = (0..10).map(|_| late()).max().unwrap();
        assert!(longest.ns > COALESCE_DELAY.ns / 2, "{longest}: the wake-up is not coalesced");
        lingers.store(false, Ordering::Relaxed);
        late();
        let shortest = (0..10).map(|_| late()).min().unwrap();
        assert!(shortest.ns < COALESCE_DELAY.ns / 2, "{shortest}: they linger for ever");
        reactors.stop();
    }

    #[test]
    fn thread_keeps_its_state_when_it_migrates_over_all_reactors() {
        struct Beat(u64);
        impl Poller for Beat {
            fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
                self.0 += 1;
                PollResult::Idle
            }
        }
        let reactors = start_reactors(PollMode::Adaptive);
        let plan = ThreadBuilder::new("traveller")
            .add_poller(PollerBuilder::polled_each_iteration("beat", PollerWake::Messages, Beat(0)))
            .add_poller(PollerBuilder::polled_each_period("tick", Span::from_ms(1), Beat(0)));
        let thread = reactors.spawn(plan).unwrap();
        let homes: Vec<_> = reactors.registry().reactors().collect();
        for home in homes.iter().cycle().take(50) {
            reactors.registry().migrate_thread(thread.id(), *home).unwrap();
            let end = reactors.clock().now().after(Span::from_secs(20));
            while call_on_thread(&thread, |context| context.reactor_id()) != *home {
                assert!(reactors.clock().now() < end, "it never comes to {home}");
            }
        }
        let sample = reactors.sample();
        assert_eq!(sample.threads[0].migrations, if homes.len() > 1 { 49 } else { 0 });
        reactors.stop();
    }

    #[test]
    fn watchdog_names_the_poller_that_blocks_and_shows_its_stack() {
        struct Blocker(Receiver<()>);
        impl Poller for Blocker {
            fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
                wait_in_a_poller(&self.0);
                PollResult::Idle
            }
        }
        #[inline(never)]
        fn wait_in_a_poller(wait: &Receiver<()>) {
            // It ends when the test has seen the report, and returns at once from then on.
            let _ = wait.recv_timeout(TIME_LIMIT);
            std::hint::black_box(());
        }
        let mut reactors = start_reactors(PollMode::Adaptive);
        let (report, reported) = channel();
        let told = move |stall: &super::StallReport| drop(report.send(stall.clone()));
        reactors.start_watchdog(Span::from_ms(100), told).unwrap();
        let (unblock, wait) = channel();
        let blocker =
            PollerBuilder::polled_each_iteration("blocker", PollerWake::Messages, Blocker(wait));
        reactors.spawn(ThreadBuilder::new("blocked").add_poller(blocker)).unwrap();
        let stall = reported.recv_timeout(TIME_LIMIT).unwrap();
        drop(unblock);
        let text = stall.to_string();
        let runs = "poller 'blocker' of thread 'blocked' runs";
        assert!(text.contains(runs) && stall.lasts >= Span::from_ms(100), "{text}");
        assert!(reported.try_recv().is_err(), "once per iteration");
        // Where the kernel shows no system calls of threads, the stack is unknown.
        if text.contains("in system call") {
            assert!(text.contains("wait_in_a_poller"), "{text}");
        }
        let is_reported = |kind| {
            let recorded = crate::flight_recorder::recorded_events();
            let mut events = recorded.iter().flat_map(|log| log.events.iter());
            events.any(|event| event.kind == kind)
        };
        assert!(is_reported(crate::flight_recorder::FlightEventKind::Stalled));
        let end = reactors.clock().now().after(Span::from_secs(20));
        while !is_reported(crate::flight_recorder::FlightEventKind::Resumed) {
            assert!(reactors.clock().now() < end, "the end of the stall is never recorded");
            tenmil_linux::named_thread::sleep(Span::from_ms(5));
        }
        let registry = reactors.registry();
        let kinds = registry.events_since(0).events;
        assert!(kinds.iter().any(|noted| noted.event.kind() == "reactor-stalled"), "{kinds:?}");
        reactors.stop();
    }

    #[test]
    fn flight_recorder_has_the_events_of_each_reactor() {
        let reactors = start_reactors(PollMode::Adaptive);
        let thread = reactors.spawn(ThreadBuilder::new("recorded thread")).unwrap();
        call_on_thread(&thread, |context| {
            let kind = crate::flight_recorder::FlightEventKind::ConnectionAccepted;
            crate::flight_recorder::record(context.now(), kind, [815, 0]);
        });
        let logs = crate::flight_recorder::recorded_events();
        let text = crate::flight_recorder::flight_text(&logs, tenmil_linux::clock::utc_now());
        let started = format!("thread {} 'recorded thread' on reactor", thread.id());
        assert!(text.contains(&started), "{text}");
        assert!(text.contains(" connection-accepted: connection 815\n"), "{text}");
        reactors.stop();
    }

    #[test]
    fn reactor_continues_after_poller_panics() {
        let reactors = start_reactors(PollMode::Adaptive);
        let (send, reported) = channel();
        let plan = ThreadBuilder::new("doomed").run_first(move |context| {
            let doomed =
                PollerBuilder::polled_each_iteration("doomed", PollerWake::Messages, Doomed);
            let doomed = doomed.on_panic(move |_, panicked| drop(send.send(panicked)));
            context.add_poller(doomed).unwrap();
        });
        let thread = reactors.spawn(plan).unwrap();
        let panicked = reported.recv_timeout(TIME_LIMIT).unwrap();
        assert_eq!(panicked.to_string(), "poller 'doomed' of thread 0 panicked: on purpose");
        assert_eq!(call_on_thread(&thread, |context| context.name().to_owned()), "doomed");
        let kinds: Vec<_> = reactors.registry().events_since(0).events;
        assert!(kinds.iter().any(|noted| noted.event.kind() == "poller-panicked"), "{kinds:?}");
    }

    struct Doomed;

    impl Poller for Doomed {
        fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
            panic!("on purpose");
        }
    }
}
