//! Reservations in files, so that they survive a loss of power.
//!
//! ```text
//!   DIRECTORY/lock                        locked while somebody serves from here
//!   DIRECTORY/reservations-HASH-NSID      the subsystem's name, a line feed, the record
//! ```
//!
//! A file is written beside the one it replaces, made durable, given its name, and the name made
//! durable: whenever the power goes, the one or the other is there, whole. If only the last of that
//! fails, the change is refused, and the old file gets its name back. A thread of its own does
//! that, one file after the other in the order in which they were handed in; nobody who serves a host
//! waits for it.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ctrl::controller::{Keeper, Stored};
use host::pool::{Intake, Job, Pool};

/// A directory for what survives a loss of power. As long as it or a keeper of it is there, nobody
/// else gets the same directory. Dropping it waits until everything that was handed in has been
/// written.
#[derive(Debug)]
pub struct StateDirectory {
    disk: Directory,
    writer: Pool,
}

/// What files are written to.
trait Disk: Send {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>>;
    /// Puts these bytes into a file, in place of what was in it. They may be lost before `sync`.
    fn write(&mut self, name: &str, bytes: &[u8]) -> io::Result<()>;
    fn sync(&mut self, name: &str) -> io::Result<()>;
    /// Names are as they were, or as they are now, before `sync_names`.
    fn rename(&mut self, from: &str, to: &str) -> io::Result<()>;
    fn remove(&mut self, name: &str) -> io::Result<()>;
    fn sync_names(&mut self) -> io::Result<()>;
}

/// The reservations of one namespace.
struct Kept<D> {
    file: Place<D>,
    intake: Intake,
    found: Result<Option<Vec<u8>>, String>,
}

/// Where they are.
#[derive(Clone)]
struct Place<D> {
    disk: D,
    name: String,
    nqn: String,
    /// For people.
    shown: String,
}

#[derive(Clone, Debug)]
struct Directory {
    path: PathBuf,
    _lock: Arc<File>,
}

/// How long whoever offers a namespace waits for what is kept of it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Records that wait for the disk: one of each namespace at most, and of those that have gone.
const WAITING_MAX: usize = 1 << 16;

impl StateDirectory {
    /// Opens the directory at `path`, which is made if there is none.
    ///
    /// # Errors
    ///
    /// A line, if that cannot be, or another process has it.
    pub fn open(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let wrong = |doing: &str, error: &io::Error| format!("{doing} {shown}: {error}");
        match std::fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(wrong("make the state directory", &error));
            }
            _ => {}
        }
        let mut options = OpenOptions::new();
        let lock = options.create(true).truncate(false).write(true).mode(0o600);
        let lock = lock.open(path.join("lock"));
        let lock = lock.map_err(|error| wrong("open the state directory", &error))?;
        lock.try_lock().map_err(|_| {
            format!("use the state directory {shown}: another process has it, expected none")
        })?;
        let disk = Directory { path: path.to_owned(), _lock: Arc::new(lock) };
        Ok(Self { disk, writer: Pool::new(1, WAITING_MAX) })
    }

    /// Where the reservations of a namespace are kept. Waits for the disk.
    #[must_use]
    pub fn keeper(&self, nqn: &str, nsid: u32) -> Box<dyn Keeper> {
        let name = name_of(nqn, nsid);
        let shown = self.disk.path.join(&name).display().to_string();
        let file = Place { disk: self.disk.clone(), name, nqn: nqn.to_owned(), shown };
        Box::new(Kept::new(file, self.writer.intake()))
    }
}

/// A file's name, in which no character of a subsystem's name can do harm.
fn name_of(nqn: &str, nsid: u32) -> String {
    let hash = nqn.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("reservations-{hash:016x}-{nsid}")
}

impl<D: Disk + Clone + 'static> Keeper for Kept<D> {
    fn load(&self) -> Result<Option<Vec<u8>>, String> {
        self.found.clone()
    }

    fn store(&mut self, record: Option<Vec<u8>>, stored: Stored) -> Result<(), Stored> {
        let (mut file, intake) = (self.file.clone(), self.intake.clone());
        // A job that nobody takes is dropped, and what it had to tell must not be.
        let stored = Arc::new(Mutex::new(Some(stored)));
        let theirs = Arc::clone(&stored);
        let job = Job::new("keep reservations", move || {
            let written = file.write(record.as_deref());
            if let Some(stored) = take(&theirs) {
                stored.ended(written);
            }
        });
        match intake.submit(job) {
            Ok(()) => Ok(()),
            Err(_) => take(&stored).map_or(Ok(()), Err),
        }
    }
}

fn take(stored: &Mutex<Option<Stored>>) -> Option<Stored> {
    stored.lock().unwrap_or_else(PoisonError::into_inner).take()
}

impl<D: Disk> Kept<D> {
    /// What is kept of a namespace, as it is when all that was handed in before has been written.
    fn new(file: Place<D>, intake: Intake) -> Self
    where
        D: Clone + 'static,
    {
        let (tell, told) = channel();
        let reads = file.clone();
        // Whoever asks may wait. It is not told anything by a pool that takes no more.
        let job = Job::new("read reservations", move || {
            let _ = tell.send(reads.read());
        });
        let wrong = format!("read {}: no thread to read it, expected one", file.shown);
        let asked = intake.submit(job);
        let found = match asked {
            Ok(()) => told.recv_timeout(PATIENCE).unwrap_or_else(|error| match error {
                RecvTimeoutError::Disconnected => Err(wrong),
                RecvTimeoutError::Timeout => Err(format!(
                    "read {}: the disk has not answered for {} s: it may be full of what was written \
                     before, or stand still",
                    file.shown,
                    PATIENCE.as_secs()
                )),
            }),
            Err(_) => Err(wrong),
        };
        Self { file, intake, found }
    }
}

impl<D: Disk> Place<D> {
    fn read(&self) -> Result<Option<Vec<u8>>, String> {
        let found = self.disk.read(&self.name);
        let found = found.map_err(|error| format!("read {}: {error}", self.shown))?;
        let Some(bytes) = found else { return Ok(None) };
        let record = bytes.strip_prefix(self.nqn.as_bytes());
        let record = record.and_then(|rest| rest.strip_prefix(b"\n")).ok_or_else(|| {
            format!(
                "read {}: it is not of {}, expected its name in the first line: move the file away \
                 to begin without reservations",
                self.shown, self.nqn
            )
        })?;
        Ok(Some(record.to_vec()))
    }

    fn write(&mut self, record: Option<&[u8]>) -> Result<(), String> {
        let Self { disk, name, nqn, shown } = self;
        let wrong = |error: io::Error| format!("write {shown}: {error}");
        let before = disk.read(name).map_err(wrong)?;
        let bytes = record.map(|record| [nqn.as_bytes(), b"\n", record].concat());
        exchange(disk, name, bytes.as_deref()).map_err(wrong)?;
        let Err(error) = disk.sync_names() else { return Ok(()) };
        // It has its name, and a restart would find what is refused now.
        let back = exchange(disk, name, before.as_deref()).and_then(|()| disk.sync_names());
        Err(match back {
            Ok(()) => wrong(error),
            Err(worse) => format!(
                "write {shown}: {error}; nor could what was there before be put back ({worse}), so \
                 that a restart may find the change which is refused now"
            ),
        })
    }
}

/// Puts these bytes under a name, or takes it away. Whether that lasts, `sync_names` says.
fn exchange(disk: &mut impl Disk, name: &str, bytes: Option<&[u8]>) -> io::Result<()> {
    let Some(bytes) = bytes else { return disk.remove(name) };
    let draft = format!("{name}.new");
    disk.write(&draft, bytes)?;
    disk.sync(&draft)?;
    disk.rename(&draft, name)
}

impl Disk for Directory {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        match OpenOptions::new().read(true).open(self.path.join(name)) {
            Ok(mut file) => file.read_to_end(&mut bytes).map(|_| Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn write(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let options = options.create(true).truncate(true).write(true).mode(0o600);
        options.open(self.path.join(name))?.write_all(bytes)
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        OpenOptions::new().write(true).open(self.path.join(name))?.sync_all()
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        match std::fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn sync_names(&mut self) -> io::Result<()> {
        OpenOptions::new().read(true).open(&self.path)?.sync_all()
    }
}

impl<D> fmt::Debug for Kept<D> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Kept").field("name", &self.file.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io;
    use std::sync::mpsc::{Receiver, channel};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use base::Instant;
    use block::Ram;
    use ctrl::controller::contract::{Origin, Signal};
    use ctrl::controller::{
        Controller, ControllerConfig, HostIdentity, Keeper, NamespaceConfig, Persistence,
        Subsystem, SubsystemConfig,
    };
    use dma::Regions;
    use host::pool::Pool;
    use wire::io::reservation::{
        ChangePersistence, RegisterAction, RegisterKeys, ReservationRegister,
    };
    use wire::{Status, Typed};

    use super::{Disk, Kept, Place, StateDirectory};

    /// A disk whose power may go at each step.
    #[derive(Clone, Default)]
    struct Fragile(Arc<Mutex<State>>);

    #[derive(Default)]
    struct State {
        /// Each file as it is, and as it is for certain.
        files: Vec<(Vec<u8>, Vec<u8>)>,
        names: BTreeMap<String, usize>,
        durable_names: BTreeMap<String, usize>,
        steps_left: usize,
        /// After the step that fails, all goes well again.
        stumbles: bool,
    }

    impl Fragile {
        fn step<T>(&self, act: impl FnOnce(&mut State) -> T) -> io::Result<T> {
            let mut state = self.0.lock().unwrap();
            if state.steps_left == 0 {
                if std::mem::take(&mut state.stumbles) {
                    state.steps_left = usize::MAX;
                }
                return Err(io::Error::other("no power"));
            }
            state.steps_left -= 1;
            Ok(act(&mut state))
        }

        /// The power goes: what was not synced is there, half there, or not.
        fn cut(&self, names_survive: bool, survives: impl Fn(&[u8]) -> Vec<u8>) {
            let state = &mut *self.0.lock().unwrap();
            for (now, durable) in &mut state.files {
                if now != durable {
                    *now = survives(now);
                }
                durable.clone_from(now);
            }
            if !names_survive {
                state.names.clone_from(&state.durable_names);
            }
            state.durable_names.clone_from(&state.names);
        }
    }

    impl Disk for Fragile {
        fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
            let state = self.0.lock().unwrap();
            Ok(state.names.get(name).map(|index| state.files[*index].0.clone()))
        }

        fn write(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
            self.step(|state| {
                state.files.push((bytes.to_vec(), Vec::new()));
                state.names.insert(name.to_owned(), state.files.len() - 1);
            })
        }

        fn sync(&mut self, name: &str) -> io::Result<()> {
            self.step(|state| {
                let (now, durable) = &mut state.files[state.names[name]];
                durable.clone_from(now);
            })
        }

        fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
            self.step(|state| {
                let index = state.names.remove(from).unwrap();
                state.names.insert(to.to_owned(), index);
            })
        }

        fn remove(&mut self, name: &str) -> io::Result<()> {
            self.step(|state| {
                state.names.remove(name);
            })
        }

        fn sync_names(&mut self) -> io::Result<()> {
            self.step(|state| state.durable_names.clone_from(&state.names))
        }
    }

    fn place() -> (Fragile, Place<Fragile>) {
        let disk = Fragile::default();
        disk.0.lock().unwrap().steps_left = usize::MAX;
        let (name, nqn, shown) = ("r".to_owned(), "nqn".to_owned(), "r".to_owned());
        (disk.clone(), Place { disk, name, nqn, shown })
    }

    #[test]
    fn whenever_the_power_goes_the_one_or_the_other_record_is_there() {
        let (old, new) = (b"the old one".to_vec(), b"the new one".to_vec());
        // Of what was not synced, nothing, a half or all is there.
        let fates =
            [0, 1, 2].map(|halves| move |bytes: &[u8]| bytes[..bytes.len() * halves / 2].to_vec());
        for after in [Some(new.as_slice()), None] {
            for (steps, names_survive) in (0..=4).flat_map(|steps| [(steps, false), (steps, true)])
            {
                for fate in fates {
                    let (disk, mut place) = place();
                    place.write(Some(&old)).unwrap();
                    disk.0.lock().unwrap().steps_left = steps;
                    let stored = place.write(after);
                    disk.cut(names_survive, fate);
                    let found = place.read().unwrap();
                    let is_new = found.as_deref() == after;
                    assert!(is_new || found.as_ref() == Some(&old), "{steps} steps: {found:?}");
                    assert!(is_new || stored.is_err(), "{steps} steps: it was said to be written");
                }
            }
        }
    }

    #[test]
    fn what_is_refused_because_one_step_failed_is_not_found_after_a_restart() {
        let (old, new) = (b"the old one".to_vec(), b"the new one".to_vec());
        for before in [Some(old.as_slice()), None] {
            for after in [Some(new.as_slice()), None] {
                for (steps, names_survive) in
                    (0..=3).flat_map(|steps| [(steps, false), (steps, true)])
                {
                    let (disk, mut place) = place();
                    place.write(before).unwrap();
                    disk.0.lock().unwrap().steps_left = steps;
                    disk.0.lock().unwrap().stumbles = true;
                    let stored = place.write(after);
                    disk.cut(names_survive, <[u8]>::to_vec);
                    let expected = if stored.is_ok() { after } else { before };
                    assert_eq!(place.read().unwrap().as_deref(), expected, "{steps} steps");
                }
            }
        }
        // If that cannot be either, it is said.
        let (disk, mut place) = place();
        disk.0.lock().unwrap().steps_left = 3;
        let why = place.write(Some(&new)).unwrap_err();
        assert!(why.contains("a restart may find the change which is refused now"), "{why}");
    }

    /// A host whose reservations are kept.
    struct World {
        controller: Controller,
        mail: Receiver<()>,
    }

    impl World {
        fn new(keeper: Box<dyn Keeper>) -> Self {
            let medium = Arc::new(Ram::new(&Regions::new(4), 512, 8).unwrap());
            let persistence = Persistence::Kept(keeper);
            let namespace = NamespaceConfig { persistence, ..NamespaceConfig::new(medium) };
            let subsystem = SubsystemConfig::new("KEPT", vec![namespace]);
            let subsystem = Subsystem::new(subsystem).unwrap();
            let config = ControllerConfig::default();
            let mut controller = subsystem.controller(Instant::default(), config).unwrap();
            controller.set_host(HostIdentity::Extended(7));
            let (ring, mail) = channel();
            // Nobody listens any more once the world is gone.
            controller.ring_on_mail(Arc::new(move || {
                let _ = ring.send(());
            }));
            Self { controller, mail }
        }

        /// Has its host registered, to persist or not to.
        fn ask(&mut self, persists: bool) {
            let cptpl =
                if persists { ChangePersistence::Persist } else { ChangePersistence::Clear };
            let command = ReservationRegister {
                nsid: 1,
                rrega: RegisterAction::Register,
                iekey: false,
                disnsrs: false,
                cptpl,
            };
            let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(5));
            let (now, from) = (Instant::default(), Origin { queue: 1, ticket: 1 });
            let mut data = keys.as_bytes().to_vec();
            let ended = self.controller.reservation(now, from, &command.to_command(), &mut data);
            assert_eq!(ended, None, "the disk is not waited for");
        }

        fn decided(&mut self) -> Option<Status> {
            self.controller.turn(Instant::default());
            self.controller.next_decided().map(|decided| decided.end.status)
        }

        /// Waits for the answer.
        fn answer(&mut self) -> Status {
            loop {
                self.mail.recv_timeout(Duration::from_secs(20)).expect("it ends");
                if let Some(status) = self.decided() {
                    return status;
                }
            }
        }
    }

    #[test]
    fn what_is_written_is_read_by_the_next_process_and_by_one_at_a_time() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("state");
        let first = StateDirectory::open(&path).unwrap();
        let keeper = first.keeper("nqn.one", 1);
        assert_eq!(keeper.load(), Ok(None));
        let mut world = World::new(keeper);
        for _ in 0..2 {
            world.ask(true);
            assert_eq!(world.answer(), Status::SUCCESS);
        }
        let written = first.keeper("nqn.one", 1).load();
        assert!(matches!(written, Ok(Some(_))));
        let mut other = World::new(first.keeper("nqn.one", 2));
        for persists in [true, false] {
            other.ask(persists);
            assert_eq!(other.answer(), Status::SUCCESS);
        }
        let refused = StateDirectory::open(&path).unwrap_err();
        assert!(refused.contains("another process has it"), "{refused}");
        drop((first, world, other));
        let again = StateDirectory::open(&path).unwrap();
        assert_eq!(again.keeper("nqn.one", 1).load(), written);
        assert_eq!(again.keeper("nqn.one", 2).load(), Ok(None));
        // A file of another subsystem in its place is nobody's.
        let name = path.join(super::name_of("nqn.two", 1));
        std::fs::copy(path.join(super::name_of("nqn.one", 1)), name).unwrap();
        let refused = again.keeper("nqn.two", 1).load().unwrap_err();
        assert!(refused.contains("it is not of nqn.two"), "{refused}");
    }

    #[test]
    fn whoever_lets_go_of_the_directory_waits_until_all_is_written() {
        let root = tempfile::tempdir().unwrap();
        for nsid in 1..40 {
            let state = StateDirectory::open(root.path()).unwrap();
            let mut world = World::new(state.keeper("nqn.one", nsid));
            world.ask(true);
            drop(state);
            assert!(root.path().join(super::name_of("nqn.one", nsid)).exists());
        }
    }

    /// A disk that takes its time.
    #[derive(Clone)]
    struct Slow {
        disk: Fragile,
        gate: Arc<Mutex<Receiver<()>>>,
    }

    impl Disk for Slow {
        fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
            self.disk.read(name)
        }

        fn write(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
            // Whoever opens it may have gone.
            let _ = self.gate.lock().unwrap().recv();
            self.disk.write(name, bytes)
        }

        fn sync(&mut self, name: &str) -> io::Result<()> {
            self.disk.sync(name)
        }

        fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
            self.disk.rename(from, to)
        }

        fn remove(&mut self, name: &str) -> io::Result<()> {
            self.disk.remove(name)
        }

        fn sync_names(&mut self) -> io::Result<()> {
            self.disk.sync_names()
        }
    }

    #[test]
    fn a_slow_disk_holds_up_the_answer_and_nobody_else() {
        let (fragile, place) = place();
        let (open, gate) = channel();
        let disk = Slow { disk: fragile.clone(), gate: Arc::new(Mutex::new(gate)) };
        let Place { name, nqn, shown, .. } = place;
        let slow = Place { disk, name, nqn, shown };
        let pool = Pool::new(1, 8);
        let mut world = World::new(Box::new(Kept::new(slow.clone(), pool.intake())));
        world.ask(true);
        assert_eq!(world.decided(), None);
        open.send(()).unwrap();
        assert_eq!(world.answer(), Status::SUCCESS);
        let first = slow.read().unwrap();
        assert!(first.is_some());
        // The disk fails half way: so does the command, and its reason is told.
        world.ask(true);
        fragile.0.lock().unwrap().steps_left = 2;
        assert_eq!(world.decided(), None);
        open.send(()).unwrap();
        assert_eq!(world.answer(), Status::INTERNAL_ERROR);
        let why = Signal::NotKept { why: "write r: no power".to_owned() };
        assert_eq!(world.controller.next_signal(), Some(why));
        assert_eq!(slow.read().unwrap(), first);
        // Who asks what is there is told after all that was handed in before.
        fragile.0.lock().unwrap().steps_left = usize::MAX;
        world.ask(true);
        drop(world);
        drop(open);
        let next = Kept::new(slow.clone(), pool.intake()).load().unwrap();
        assert_ne!(next, first);
        assert_eq!(next, slow.read().unwrap());
        // Where nobody is left to write, nothing is.
        let refused = Kept::new(slow.clone(), Pool::new(0, 0).intake()).load().unwrap_err();
        assert!(refused.contains("no thread to read it"), "{refused}");
    }

    #[test]
    fn a_place_that_cannot_be_is_refused_with_its_name() {
        let refused = StateDirectory::open("/proc/nowhere/state".as_ref()).unwrap_err();
        assert!(refused.contains("/proc/nowhere/state"), "{refused}");
    }
}
