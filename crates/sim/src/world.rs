//! Everything together: a host, a bus, a device and its medium, on one clock and one seed.
//!
//! ```text
//!   loop:  device turns, host turns          while anything moves, time stands still
//!          nothing moved: jump               to the earliest wake-up of anybody
//!          nobody wants to be woken          something is outstanding and never will be answered
//! ```

use base::{Durability, Instant, Random, Span};
use nvme::{ControllerError, State};

use crate::bus::Bus;
use crate::device::{Device, DeviceOptions};
use crate::evil::{Evil, Mischief};
use crate::failure::Failure;
use crate::function::{ControllerFunction, FunctionOptions};
use crate::host::{Host, HostOptions, Work};
use crate::medium::{MediumOptions, SimMedium};
use crate::oracle::Oracle;
use crate::planted::Planted;
use crate::trace::Kind;
use crate::workload::{Mix, Pieces, Profile, Workload};

/// What a world is made of. Together with the seed it says everything.
#[derive(Clone, Debug)]
pub struct WorldOptions {
    /// Where all random numbers come from.
    pub seed: u64,
    /// The driver's side.
    pub host: HostOptions,
    /// The bus.
    pub device: DeviceOptions,
    /// The controller.
    pub function: FunctionOptions,
    /// The medium.
    pub medium: MediumOptions,
    /// What the device does wrong.
    pub plan: Vec<Mischief>,
    /// What is asked of it.
    pub profile: Profile,
    /// Bytes of host memory that the device could be given.
    pub pool_bytes: usize,
    /// How long it takes to cut the device off from memory.
    pub cut_off_lag: Span,
    /// A mistake in the host or the harness, made on purpose to see whether it is found.
    pub planted: Option<Planted>,
}

/// A world.
pub struct World {
    /// What lies between host and device.
    pub bus: Bus,
    /// The device.
    pub device: Device,
    /// Its medium.
    pub medium: SimMedium,
    /// The host, once it has found the device.
    pub host: Option<Host>,
    /// What is asked.
    pub workload: Workload,
    options: WorldOptions,
}

/// How long things may take, whatever the device does. Each is the sum of the deadlines that the
/// driver has been given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// From the first look at the registers to a verdict.
    pub attach: Span,
    /// From a request to its answer.
    pub answer: Span,
    /// From a fault to a working or a dead controller.
    pub recovery: Span,
    /// From the wish to shut down to its end.
    pub shutdown: Span,
}

/// The device's own memory: bounce buffers.
const PRIVATE_BYTES: usize = 256 << 10;
/// Turns in one instant after which the world gives up.
const TURNS_MAX: u32 = 20_000;
/// Who wants to be called at once, again and again, is called this often, and less and less.
const SPIN_MIN: Span = Span { ns: 500 };
const SPIN_MAX: Span = Span::from_us(50);
/// Nobody may want to be called at once for so long while nothing moves.
const RESTLESS_MAX: Span = Span::from_ms(50);

impl Default for WorldOptions {
    fn default() -> Self {
        Self {
            seed: 1,
            host: HostOptions::default(),
            device: DeviceOptions::default(),
            function: FunctionOptions::default(),
            medium: MediumOptions::default(),
            plan: Vec::new(),
            profile: Profile {
                count: 60,
                depth: 8,
                mix: Mix::Flushes,
                blocks: (1, 8),
                span: 128,
                pieces: Pieces::Whole,
            },
            pool_bytes: 64 << 20,
            cut_off_lag: Span::default(),
            planted: None,
        }
    }
}

impl World {
    /// A world at its first moment: nobody has looked at the device yet.
    ///
    /// # Errors
    ///
    /// If the options make no sense, or the machine has no memory.
    pub fn new(options: &WorldOptions) -> Result<Self, String> {
        let mut random = Random::new(options.seed);
        let evil = Evil::new(&options.plan, random.fork());
        let bus = Bus::new(options.pool_bytes, PRIVATE_BYTES, evil)?;
        bus.with(|state| {
            state.cut_off_lag = options.cut_off_lag;
            state.ignores_cut_off = options.planted == Some(Planted::CutOffIgnored);
            state.hastens_cut_off = options.planted == Some(Planted::CutOffNotAwaited);
        });
        let medium = SimMedium::new(&bus, options.medium.clone(), random.fork());
        let function = ControllerFunction::new(&bus, &medium, &options.function)?;
        let device =
            Device::new(&bus, Box::new(function), medium.clone(), options.device, random.fork());
        let block_size = options.medium.block_size;
        let is_volatile = options.medium.durability == Durability::VolatileCache;
        let oracle = Oracle::new(options.seed, block_size as usize, is_volatile);
        let workload = Workload::new(&bus, options.profile, oracle, block_size, random.fork());
        Ok(Self { bus, device, medium, host: None, workload, options: options.clone() })
    }

    /// What it was made of.
    pub fn options(&self) -> &WorldOptions {
        &self.options
    }

    /// A host finds the device.
    pub fn attach(&mut self) -> Result<(), ControllerError> {
        self.host = None;
        let WorldOptions { host, planted, .. } = self.options.clone();
        self.host = Some(Host::new(&self.bus, &self.device, host, planted)?);
        Ok(())
    }

    /// How far the driver is; `None` without one.
    pub fn state(&self) -> Option<State> {
        self.host.as_ref().map(Host::state)
    }

    /// Whether the driver has given up, or was told to end.
    pub fn has_ended(&self) -> bool {
        matches!(self.state(), None | Some(State::Dead | State::Removed | State::ShutDown))
    }

    /// Turns the world until `is_done`, for at most `bound`. True if it was done in time.
    ///
    /// # Errors
    ///
    /// The first promise that is broken on the way.
    pub fn run(
        &mut self,
        work: Work,
        bound: Span,
        is_done: impl Fn(&Self) -> bool,
    ) -> Result<bool, Failure> {
        let deadline = self.bus.now().after(bound);
        let mut turns = 0;
        let (mut spin, mut restless_since) = (SPIN_MIN, None);
        loop {
            let before = self.progress();
            self.turn(work);
            if let Some(failure) = self.bus.with(|state| state.failures.first().cloned()) {
                return Err(failure);
            }
            if is_done(self) {
                return Ok(true);
            }
            let now = self.bus.now();
            if self.progress() != before {
                (turns, spin, restless_since) = (turns + 1, SPIN_MIN, None);
                if turns > TURNS_MAX {
                    return Err(Failure::Spinning { at: now, turns });
                }
                continue;
            }
            let Some(wake) = self.wake_at() else { return Ok(false) };
            let wake = if wake > now {
                restless_since = None;
                wake
            } else {
                let since = *restless_since.get_or_insert(now);
                if now.since(since) > RESTLESS_MAX {
                    return Err(Failure::Restless { who: self.restless(), since, at: now });
                }
                spin = Span { ns: (spin.ns * 2).min(SPIN_MAX.ns) };
                now.after(spin)
            };
            if wake > deadline {
                self.bus.with(|state| state.clock.jump(deadline));
                return Ok(false);
            }
            turns = 0;
            self.bus.with(|state| state.clock.jump(wake));
            self.check_patience(now)?;
        }
    }

    /// How long things may take.
    pub fn bounds(&self) -> Bounds {
        let host = &self.options.host.controller;
        // A register that lies about CAP.TO can say at most 255 units.
        let ready = self.options.function.ready_timeout;
        let plus = |spans: &[Span]| Span { ns: spans.iter().map(|span| span.ns).sum() };
        let times = |span: Span, count: u64| Span { ns: span.ns * count };
        // Waiting for RDY=1 before clearing EN, for RDY=0, for RDY=1.
        let walk = times(ready, 3);
        // A command is found overdue up to an eighth late, is aborted, and gets its time once more.
        let admin = times(host.admin_timeout, 3);
        let io = times(host.io_timeout, 3);
        // The walk, and one admin command that fails.
        let attach = plus(&[walk, admin, host.status_interval, SLACK]);
        let reset = plus(&[io, attach]);
        let recovery = times(reset, u64::from(host.resets_max) + 1);
        let shutdown =
            plus(&[host.quiesce_timeout, host.shutdown_timeout, times(admin, 2), walk, SLACK]);
        Bounds { attach, answer: recovery, recovery, shutdown }
    }

    fn progress(&self) -> u64 {
        self.bus.with(|state| state.trace.progress())
    }

    fn turn(&mut self, work: Work) {
        self.device.turn();
        let now = self.bus.now();
        if let Some(host) = &mut self.host {
            host.turn(now, &mut self.workload, work);
        }
    }

    /// Who wants to be called at once.
    fn restless(&self) -> &'static str {
        let is_due = |wake: Option<Instant>| wake.is_some_and(|wake| wake <= self.bus.now());
        if is_due(self.device.wake_at().wake()) { "the device" } else { "the driver" }
    }

    fn wake_at(&self) -> Option<Instant> {
        let device = self.device.wake_at();
        let host = self.host.as_ref().map_or(device, |host| host.wake_at());
        let earliest = [device.wake(), host.wake()].into_iter().flatten().min();
        earliest.filter(|wake| *wake != Instant::NEVER)
    }

    /// No request may wait longer than its bound.
    fn check_patience(&self, now: Instant) -> Result<(), Failure> {
        let Some((token, since)) = self.workload.oldest() else { return Ok(()) };
        if self.host.is_some() && now.since(since) > self.bounds().answer {
            let count = self.workload.outstanding();
            return Err(Failure::NeverAnswered { token, count, at: now });
        }
        Ok(())
    }
}

impl Drop for World {
    /// The host goes first, then the device with its channels; what is under way in the medium then
    /// is nobody's.
    fn drop(&mut self) {
        self.bus.record(Kind::Harness, [0, 0, 0]);
        self.medium.dismantle();
        self.host = None;
        self.device.dismantle();
    }
}

/// What turning the handle takes by itself: a start-up is about twenty commands of some
/// microseconds each.
const SLACK: Span = Span::from_ms(100);

#[cfg(test)]
mod tests {
    use nvme::{Event, ShutdownNotification, State};

    use super::{World, WorldOptions};
    use crate::host::{Host, Work};

    fn session(options: &WorldOptions) -> (World, u64) {
        let mut world = World::new(options).unwrap();
        let bounds = world.bounds();
        world.attach().unwrap();
        let is_up = |world: &World| world.host.as_ref().is_some_and(Host::is_up);
        assert_eq!(world.run(Work::Drain, bounds.attach, is_up), Ok(true), "{:#?}", tail(&world));
        let is_done = |world: &World| world.workload.is_done();
        assert_eq!(
            world.run(Work::Submit, bounds.answer, is_done),
            Ok(true),
            "{:#?}",
            tail(&world)
        );
        let now = world.bus.now();
        let host = world.host.as_mut().unwrap();
        host.controller().shut_down(now, ShutdownNotification::Normal).unwrap();
        let is_down = |world: &World| world.state() == Some(State::ShutDown);
        assert_eq!(
            world.run(Work::Drain, bounds.shutdown, is_down),
            Ok(true),
            "{:#?}",
            tail(&world)
        );
        let told = world.host.as_ref().unwrap().told();
        assert!(told.contains(&Event::ShutDown { is_clean: true }), "{told:?}");
        let hash = world.bus.with(|state| state.trace.hash());
        (world, hash)
    }

    fn tail(world: &World) -> Vec<String> {
        world.bus.with(|state| state.trace.tail(60))
    }

    #[test]
    fn an_honest_device_serves_a_whole_session() {
        let (world, _) = session(&WorldOptions::default());
        let counts = world.workload.counts();
        assert_eq!((counts.submitted, counts.succeeded), (60, 60));
        assert!(counts.verified > 0);
    }

    #[test]
    fn one_seed_is_one_world_bit_for_bit_and_another_is_not() {
        let run = |seed| session(&WorldOptions { seed, ..WorldOptions::default() }).1;
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }
}
