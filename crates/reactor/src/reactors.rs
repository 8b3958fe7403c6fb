//! Reactors that turn by themselves: an OS thread for each core.

use std::sync::Arc;

use host::{Clock, Cores, Thread, turn};

use crate::directory::{Directory, NotSpawned, ReactorId, Sample};
use crate::event::Event;
use crate::message::Handle;
use crate::reactor::{Assembly, ReactorOptions};
use crate::refused::Refused;
use crate::spell::PollMode;
use crate::thread::ThreadPlan;
use crate::watch::Stopwatch;

/// Running reactors. Dropping them stops them: all threads end, once their pollers have let go or a
/// while has passed.
#[derive(Debug)]
pub struct Reactors {
    directory: Arc<Directory>,
    threads: Vec<Thread<()>>,
    clock: Clock,
}

impl Reactors {
    /// Starts a reactor for each of `cores`, all of which this process must be allowed to use, and
    /// binds it there if it may. That it may not is an event.
    pub fn start(cores: &Cores, options: &ReactorOptions, clock: &Clock) -> Result<Self, Refused> {
        let allowed = Cores::allowed();
        if cores.is_empty() {
            return Err(Refused::NoCores);
        }
        if let Some(core) = cores.iter().find(|core| !allowed.contains(*core)) {
            return Err(Refused::UnknownCore { core, allowed });
        }
        let cores: Vec<u32> = cores.iter().collect();
        let stopwatch = Stopwatch::Clock(*clock);
        let assembly = Assembly::new(&cores, options, &stopwatch, clock.now())?;
        let Assembly { directory, reactors } = assembly;
        let mut started = Self { directory, threads: Vec::new(), clock: *clock };
        for ((mut reactor, mut sleeper), core) in reactors.into_iter().zip(cores) {
            let clock = *clock;
            let name = format!("reactor-{}", reactor.id());
            let id = reactor.id();
            let body = move |_: &host::Stop| turn::run(&mut reactor, &clock, &mut sleeper);
            let thread = Thread::spawn(&name, options.pin.then_some(core), body)
                .map_err(|error| Refused::machine("start a reactor", &error))?;
            if let Err(error) = thread.pinned() {
                let event = Event::NotPinned { reactor: id, error: error.to_string() };
                started.directory.note(clock.now(), event);
            }
            started.threads.push(thread);
        }
        Ok(started)
    }

    /// Who lives on them, and what can be asked of them.
    pub fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    /// The clock that they turn by.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Starts a light thread: [`Directory::spawn`].
    pub fn spawn(&self, plan: ThreadPlan) -> Result<Handle, NotSpawned> {
        self.directory.spawn(plan)
    }

    /// Changes how all of them poll: [`Directory::set_poll_of_all`]. Refused if one could not be
    /// told; the others have been.
    pub fn set_poll(&self, mode: PollMode) -> Result<(), Refused> {
        let mut not_told = self.directory.set_poll_of_all(mode)?;
        not_told.pop().map_or(Ok(()), |(_, why)| Err(why))
    }

    /// Looks at all books.
    pub fn sample(&self) -> Sample {
        self.directory.sample(self.clock.now())
    }

    /// Stops them: all threads end, once their pollers have let go or a while has passed.
    ///
    /// # Panics
    ///
    /// If a reactor itself panicked, which no poller or message can make it do.
    pub fn stop(mut self) {
        self.order_stop();
        self.threads.drain(..).for_each(Thread::join);
    }

    fn order_stop(&self) {
        for (reactor, thread) in self.directory.reactors().zip(&self.threads) {
            while self.is_deaf(reactor) && !thread.is_finished() {
                host::thread::give_way();
            }
        }
    }

    /// Whether the reactor has no room for the order to stop.
    fn is_deaf(&self, reactor: ReactorId) -> bool {
        matches!(self.directory.stop(reactor), Err(Refused::InboxFull(_)))
    }
}

impl Drop for Reactors {
    fn drop(&mut self) {
        self.order_stop();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use base::{Instant, Random, Span};
    use host::{Clock, Cores, LINGER};
    use rustix::event::{EventfdFlags, eventfd};

    use super::Reactors;
    use crate::{Context, Found, Handle, PollMode, Poller, ReactorOptions, Refused};
    use crate::{Registration, ThreadPlan, WokenBy};

    /// Longer than anything here takes on the busiest machine.
    const PATIENCE: Duration = Duration::from_secs(20);

    fn start(poll: PollMode) -> Reactors {
        let cores: Cores = Cores::allowed().iter().take(2).collect();
        let options = ReactorOptions { poll, ..ReactorOptions::default() };
        Reactors::start(&cores, &options, &Clock::start()).unwrap()
    }

    /// Runs something on a thread and waits for the answer.
    fn ask<T: Send + 'static>(
        to: &Handle,
        question: impl FnOnce(&mut Context<'_>) -> T + Send + 'static,
    ) -> T {
        let (send, answer): (_, Receiver<T>) = channel();
        assert!(to.call(move |context| drop(send.send(question(context)))).is_ok());
        answer.recv_timeout(PATIENCE).unwrap()
    }

    #[test]
    fn cores_that_are_not_ours_are_refused_by_name() {
        let clock = Clock::kernel();
        let options = ReactorOptions::default();
        let refused = Reactors::start(&Cores::from_iter([1023]), &options, &clock).unwrap_err();
        assert!(matches!(refused, Refused::UnknownCore { core: 1023, .. }), "{refused}");
        let refused = Reactors::start(&Cores::default(), &options, &clock).unwrap_err();
        assert_eq!(refused, Refused::NoCores);
    }

    #[test]
    fn messages_reach_reactors_that_sleep_at_whatever_moment_they_come() {
        for poll in PollMode::ALL {
            let reactors = start(poll);
            let thread = reactors.spawn(ThreadPlan::new("sleeper")).unwrap();
            let mut random = Random::new(7);
            for _ in 0..200 {
                let gap = Span { ns: 1 << random.below(20) };
                let end = reactors.clock().now().after(gap);
                while reactors.clock().now() < end {
                    std::hint::spin_loop();
                }
                ask(&thread, |_| ());
            }
            let sleeps: u64 = reactors.sample().reactors.iter().map(|one| one.sleeps).sum();
            assert_eq!(sleeps == 0, poll == PollMode::Always, "{poll}: {sleeps} sleeps");
            reactors.stop();
            assert!(thread.is_gone());
        }
    }

    /// Waits for its bell, and says when it was heard.
    struct Bather {
        bell: Arc<OwnedFd>,
        heard: Sender<Instant>,
        lingers: Arc<AtomicBool>,
        clock: Clock,
    }

    impl Poller for Bather {
        fn poll(&mut self, _: &mut Context<'_>) -> Found {
            let is_rung = rustix::io::read(&self.bell, &mut [0; 8]).is_ok();
            if is_rung {
                self.heard.send(self.clock.now()).unwrap();
            }
            Found::from_count(usize::from(is_rung))
        }

        fn may_doze(&self) -> bool {
            true
        }

        fn may_linger(&self) -> bool {
            self.lingers.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn who_may_linger_is_heard_later_than_the_first_of_the_kind_and_at_once_when_he_may_not() {
        let reactors = start(PollMode::Adaptive);
        let home = reactors.directory().reactors().next().unwrap();
        let lingers = Arc::new(AtomicBool::new(true));
        let bathers = [0, 1].map(|_| {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            let bell: Arc<OwnedFd> = Arc::new(eventfd(0, flags).unwrap());
            let (heard, hears) = channel();
            let (lingers, clock) = (Arc::clone(&lingers), *reactors.clock());
            let woken_by = WokenBy::Descriptor(bell.try_clone().unwrap());
            let bather = Bather { bell: Arc::clone(&bell), heard, lingers, clock };
            let bather = Registration::active("bather", woken_by, bather);
            reactors.spawn(ThreadPlan::new("bather").on(home).poller(bather)).unwrap();
            (bell, hears)
        });
        // How long it takes until the second is heard, soon after the first.
        let late = || {
            host::thread::rest(Span::from_ms(50));
            let mut took = Span::default();
            for (bell, hears) in &bathers {
                let rung = reactors.clock().now();
                rustix::io::write(bell, &1_u64.to_ne_bytes()).unwrap();
                took = hears.recv_timeout(PATIENCE).unwrap().since(rung);
                // It falls asleep.
                host::thread::rest(Span::from_ms(3));
            }
            took
        };
        late();
        let longest = (0..10).map(|_| late()).max().unwrap();
        assert!(longest.ns > LINGER.ns / 2, "{longest}: nobody lingers");
        lingers.store(false, Ordering::Relaxed);
        late();
        let shortest = (0..10).map(|_| late()).min().unwrap();
        assert!(shortest.ns < LINGER.ns / 2, "{shortest}: they linger for ever");
        reactors.stop();
    }

    #[test]
    fn a_thread_goes_round_the_reactors_and_keeps_what_it_has() {
        struct Beat(u64);
        impl Poller for Beat {
            fn poll(&mut self, _: &mut Context<'_>) -> Found {
                self.0 += 1;
                Found::Nothing
            }
        }
        let reactors = start(PollMode::Adaptive);
        let plan = ThreadPlan::new("traveller")
            .poller(Registration::active("beat", WokenBy::Messages, Beat(0)))
            .poller(Registration::timed("tick", Span::from_ms(1), Beat(0)));
        let thread = reactors.spawn(plan).unwrap();
        let homes: Vec<_> = reactors.directory().reactors().collect();
        for home in homes.iter().cycle().take(50) {
            reactors.directory().move_thread(thread.id(), *home).unwrap();
            let end = reactors.clock().now().after(Span::from_secs(20));
            while ask(&thread, |context| context.reactor()) != *home {
                assert!(reactors.clock().now() < end, "it never comes to {home}");
            }
        }
        let sample = reactors.sample();
        assert_eq!(sample.threads[0].moves, if homes.len() > 1 { 49 } else { 0 });
        reactors.stop();
    }

    #[test]
    fn a_reactor_survives_its_pollers() {
        let reactors = start(PollMode::Adaptive);
        let (send, told) = channel();
        let plan = ThreadPlan::new("doomed").first(move |context| {
            let doomed = Registration::active("doomed", WokenBy::Messages, Doomed);
            let doomed = doomed.when_panicked(move |_, panicked| drop(send.send(panicked)));
            context.add(doomed).unwrap();
        });
        let thread = reactors.spawn(plan).unwrap();
        let panicked = told.recv_timeout(PATIENCE).unwrap();
        assert_eq!(panicked.to_string(), "poller 'doomed' of thread 0 panicked: on purpose");
        assert_eq!(ask(&thread, |context| context.name().to_owned()), "doomed");
        let kinds: Vec<_> = reactors.directory().events_since(0).noted;
        assert!(kinds.iter().any(|noted| noted.event.kind() == "poller-panicked"), "{kinds:?}");
    }

    struct Doomed;

    impl Poller for Doomed {
        fn poll(&mut self, _: &mut Context<'_>) -> Found {
            panic!("on purpose");
        }
    }
}
