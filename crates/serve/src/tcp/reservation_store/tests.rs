//! Records after power loss, and records that were moved, copied or exchanged.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenmil_base::Instant;
use tenmil_dma::RegionTable;
use tenmil_drivers::RamDevice;
use tenmil_linux::thread_pool::ThreadPool;
use tenmil_nvme_controller::controller::transport_interface::{QueueCommandId, TransportAction};
use tenmil_nvme_controller::controller::{
    Controller, ControllerConfig, HostIdentity, NamespaceConfig, ReservationPersistenceMode,
    ReservationStore, Subsystem, SubsystemConfig,
};
use tenmil_wire::io::reservation::{
    ChangePersistence, RegisterAction, RegisterKeys, ReservationRegister,
};
use tenmil_wire::{Status, TypedCommand};

use super::{RecordFile, RecordOwner, ReservationFile, StateDirectory, StateFs};

/// Simulated disk whose power can fail at each step.
#[derive(Clone, Default)]
struct PowerLossDisk(Arc<Mutex<PowerLossDiskState>>);

#[derive(Default)]
struct PowerLossDiskState {
    /// Current and durable content of each file.
    files: Vec<(Vec<u8>, Vec<u8>)>,
    names: BTreeMap<String, usize>,
    durable_names: BTreeMap<String, usize>,
    steps_left: usize,
    /// Only one step fails; the following ones succeed.
    stumbles: bool,
}

impl PowerLossDisk {
    fn run_until_power_fails<T>(
        &self,
        act: impl FnOnce(&mut PowerLossDiskState) -> T,
    ) -> io::Result<T> {
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

    /// Power loss: `survives` selects how much of the unsynced data is kept.
    fn cut_power(&self, names_survive: bool, survives: impl Fn(&[u8]) -> Vec<u8>) {
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

impl StateFs for PowerLossDisk {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let state = self.0.lock().unwrap();
        Ok(state.names.get(name).map(|index| state.files[*index].0.clone()))
    }

    fn write_pending(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.run_until_power_fails(|state| {
            state.files.push((bytes.to_vec(), Vec::new()));
            state.names.insert(name.to_owned(), state.files.len() - 1);
        })
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        self.run_until_power_fails(|state| {
            let (now, durable) = &mut state.files[state.names[name]];
            durable.clone_from(now);
        })
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        self.run_until_power_fails(|state| {
            let index = state.names.remove(from).unwrap();
            state.names.insert(to.to_owned(), index);
        })
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        self.run_until_power_fails(|state| {
            state.names.remove(name);
        })
    }

    fn sync_directory(&mut self) -> io::Result<()> {
        self.run_until_power_fails(|state| state.durable_names.clone_from(&state.names))
    }
}

fn new_disk_and_record_file() -> (PowerLossDisk, RecordFile<PowerLossDisk>) {
    let disk = PowerLossDisk::default();
    disk.0.lock().unwrap().steps_left = usize::MAX;
    let (name, nqn, shown) = ("r".to_owned(), "nqn".to_owned(), "r".to_owned());
    let owner = RecordOwner { nqn, nsid: 1, disk: "disk".to_owned() };
    (disk.clone(), RecordFile { disk, name, owner, shown })
}

#[test]
fn record_update_is_atomic_at_power_loss() {
    let (old, new) = (b"the old one".to_vec(), b"the new one".to_vec());
    // None, half or all of the unsynced data are kept.
    let fates =
        [0, 1, 2].map(|halves| move |bytes: &[u8]| bytes[..bytes.len() * halves / 2].to_vec());
    for after in [Some(new.as_slice()), None] {
        for (steps, names_survive) in (0..=4).flat_map(|steps| [(steps, false), (steps, true)]) {
            for fate in fates {
                let (disk, mut directory) = new_disk_and_record_file();
                directory.write_record(Some(&old)).unwrap();
                disk.0.lock().unwrap().steps_left = steps;
                let stored = directory.write_record(after);
                disk.cut_power(names_survive, fate);
                let found = directory.read_record().unwrap();
                let is_new = found.as_deref() == after;
                assert!(is_new || found.as_ref() == Some(&old), "{steps} steps: {found:?}");
                assert!(is_new || stored.is_err(), "{steps} steps: it was said to be written");
            }
        }
    }
}

#[test]
fn rejected_reservation_change_is_absent_after_a_restart() {
    let (old, new) = (b"the old one".to_vec(), b"the new one".to_vec());
    for before in [Some(old.as_slice()), None] {
        for after in [Some(new.as_slice()), None] {
            for (steps, names_survive) in (0..=3).flat_map(|steps| [(steps, false), (steps, true)])
            {
                let (disk, mut directory) = new_disk_and_record_file();
                directory.write_record(before).unwrap();
                disk.0.lock().unwrap().steps_left = steps;
                disk.0.lock().unwrap().stumbles = true;
                let stored = directory.write_record(after);
                disk.cut_power(names_survive, <[u8]>::to_vec);
                let expected = if stored.is_ok() { after } else { before };
                assert_eq!(directory.read_record().unwrap().as_deref(), expected, "{steps} steps");
            }
        }
    }
    // If the change cannot be undone, the error says so.
    let (disk, mut directory) = new_disk_and_record_file();
    disk.0.lock().unwrap().steps_left = 3;
    let why = directory.write_record(Some(&new)).unwrap_err();
    assert!(why.text.contains("a restart may find the change that is rejected now"), "{why}");
}

/// Host whose reservations are persistent.
struct ReservationHost {
    controller: Controller,
    mail: Receiver<()>,
}

impl ReservationHost {
    fn new(keeper: Box<dyn ReservationStore>) -> Self {
        let medium = Arc::new(RamDevice::new(&RegionTable::new(4), 512, 8).unwrap());
        let persistence = ReservationPersistenceMode::Durable(keeper);
        let namespace = NamespaceConfig { persistence, ..NamespaceConfig::new(medium) };
        let subsystem = SubsystemConfig::new("KEPT", vec![namespace]);
        let subsystem = Subsystem::new(subsystem).unwrap();
        let config = ControllerConfig::default();
        let mut controller = subsystem.open_controller(Instant::default(), config).unwrap();
        controller.set_host(HostIdentity::Extended(7));
        let (ring, mail) = channel();
        // The receiver is gone once the test has ended.
        controller.set_waker(Arc::new(move || {
            let _ = ring.send(());
        }));
        Self { controller, mail }
    }

    /// Sends a registration with or without persistence.
    fn submit_register(&mut self, persists: bool) {
        let cptpl = if persists { ChangePersistence::Persist } else { ChangePersistence::Clear };
        let command = ReservationRegister {
            nsid: 1,
            rrega: RegisterAction::Register,
            iekey: false,
            disnsrs: false,
            cptpl,
        };
        let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(5));
        let (now, from) = (Instant::default(), QueueCommandId { queue: 1, ticket: 1 });
        let mut data = keys.as_bytes().to_vec();
        let ended = self.controller.execute_reservation_command(
            now,
            from,
            &command.to_command(),
            &mut data,
        );
        assert_eq!(ended, None, "the disk is not waited for");
    }

    fn completion_status(&mut self) -> Option<Status> {
        self.controller.poll(Instant::default());
        self.controller.next_reservation_completion().map(|decided| decided.end.status)
    }

    /// Waits for the status of the registration.
    fn await_completion(&mut self) -> Status {
        loop {
            self.mail.recv_timeout(Duration::from_secs(20)).expect("it ends");
            if let Some(status) = self.completion_status() {
                return status;
            }
        }
    }
}

#[test]
fn next_process_reads_the_reservations_and_the_directory_is_locked() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("state");
    let first = StateDirectory::open(&path).unwrap();
    let keeper = first.reservation_store("nqn.one", 1, "disk");
    assert_eq!(keeper.load(), Ok(None));
    let mut world = ReservationHost::new(keeper);
    for _ in 0..2 {
        world.submit_register(true);
        assert_eq!(world.await_completion(), Status::SUCCESS);
    }
    let written = first.reservation_store("nqn.one", 1, "disk").load();
    assert!(matches!(written, Ok(Some(_))));
    let mut other = ReservationHost::new(first.reservation_store("nqn.one", 2, "disk"));
    for persists in [true, false] {
        other.submit_register(persists);
        assert_eq!(other.await_completion(), Status::SUCCESS);
    }
    let refused = StateDirectory::open(&path).unwrap_err();
    assert!(refused.text.contains("another process uses it"), "{refused}");
    drop((first, world, other));
    let again = StateDirectory::open(&path).unwrap();
    assert_eq!(again.reservation_store("nqn.one", 1, "disk").load(), written);
    assert_eq!(again.reservation_store("nqn.one", 2, "disk").load(), Ok(None));
    // A file copied from another namespace is rejected.
    let name = path.join(super::record_file_name("nqn.two", 1));
    std::fs::copy(path.join(super::record_file_name("nqn.one", 1)), name).unwrap();
    let refused = again.reservation_store("nqn.two", 1, "disk").load().unwrap_err();
    assert!(refused.text.contains("it is of namespace 1 of nqn.one"), "{refused}");
}

#[test]
fn dropping_the_directory_waits_for_pending_writes() {
    let root = tempfile::tempdir().unwrap();
    for nsid in 1..40 {
        let state = StateDirectory::open(root.path()).unwrap();
        let mut world = ReservationHost::new(state.reservation_store("nqn.one", nsid, "disk"));
        world.submit_register(true);
        drop(state);
        assert!(root.path().join(super::record_file_name("nqn.one", nsid)).exists());
    }
}

/// Disk whose writes wait for the test.
#[derive(Clone)]
struct SlowStorage {
    disk: PowerLossDisk,
    gate: Arc<Mutex<Receiver<()>>>,
}

impl StateFs for SlowStorage {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        self.disk.read(name)
    }

    fn write_pending(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        // The other end of the channel may be dropped.
        let _ = self.gate.lock().unwrap().recv();
        self.disk.write_pending(name, bytes)
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

    fn sync_directory(&mut self) -> io::Result<()> {
        self.disk.sync_directory()
    }
}

#[test]
fn slow_state_disk_delays_only_the_reservation_command() {
    let (fragile, directory) = new_disk_and_record_file();
    let (open, gate) = channel();
    let disk = SlowStorage { disk: fragile.clone(), gate: Arc::new(Mutex::new(gate)) };
    let RecordFile { name, owner, shown, .. } = directory;
    let slow = RecordFile { disk, name, owner, shown };
    let pool = ThreadPool::new(1, 8);
    let mut world =
        ReservationHost::new(Box::new(ReservationFile::new(slow.clone(), pool.handle(), false)));
    world.submit_register(true);
    assert_eq!(world.completion_status(), None);
    open.send(()).unwrap();
    assert_eq!(world.await_completion(), Status::SUCCESS);
    let first = slow.read_record().unwrap();
    assert!(first.is_some());
    // The disk fails midway: the command fails, and the event names the reason.
    world.submit_register(true);
    fragile.0.lock().unwrap().steps_left = 2;
    assert_eq!(world.completion_status(), None);
    open.send(()).unwrap();
    assert_eq!(world.await_completion(), Status::INTERNAL_ERROR);
    let why = TransportAction::PersistFailed { why: "write r: no power".to_owned() };
    assert_eq!(world.controller.next_transport_action(), Some(why));
    assert_eq!(slow.read_record().unwrap(), first);
    // A load completes after all writes that were queued before it.
    fragile.0.lock().unwrap().steps_left = usize::MAX;
    world.submit_register(true);
    drop(world);
    drop(open);
    let next = ReservationFile::new(slow.clone(), pool.handle(), false).load().unwrap();
    assert_ne!(next, first);
    assert_eq!(next, slow.read_record().unwrap());
    // Without a thread of the pool, the load fails.
    let refused = ReservationFile::new(slow.clone(), ThreadPool::new(0, 0).handle(), false)
        .load()
        .unwrap_err();
    assert!(refused.text.contains("the writer thread has ended"), "{refused}");
}

#[test]
fn invalid_state_directory_is_rejected_by_name() {
    let refused = StateDirectory::open("/proc/nowhere/state".as_ref()).unwrap_err();
    assert!(refused.text.contains("/proc/nowhere/state"), "{refused}");
}

/// File of the previous format for namespace 1 of `nqn.2026-01.org.tenmil:disk`: host identifier
/// 01…01 is registered and holds Write Exclusive.
const FORMAT_1: &[u8] = include_bytes!("../../../tests/data/reservations-format-1");
const OLD_NQN: &str = "nqn.2026-01.org.tenmil:disk";

#[test]
fn reservations_of_another_disk_are_rejected_until_adopted() {
    let root = tempfile::tempdir().unwrap();
    let state = StateDirectory::open(root.path()).unwrap();
    let mut world =
        ReservationHost::new(state.reservation_store("nqn.one", 1, "inode 5 made at 9"));
    world.submit_register(true);
    assert_eq!(world.await_completion(), Status::SUCCESS);
    drop(world);
    let refused = state.reservation_store("nqn.one", 1, "inode 6 made at 9").load().unwrap_err();
    let name = super::record_file_name("nqn.one", 1);
    for part in [
        "inode 5 made at 9",
        "inode 6 made at 9",
        "namespace 1 of nqn.one",
        &format!("--adopt-reservations {name}"),
        &format!("rm {}", root.path().join(&name).display()),
    ] {
        assert!(refused.text.contains(part), "{refused}");
    }
    let written = state.reservation_store("nqn.one", 1, "inode 5 made at 9").load();
    assert!(matches!(written, Ok(Some(_))), "what is refused is not changed");
    drop(state);
    let state = StateDirectory::open(root.path()).unwrap().adopt_records(&[name]).unwrap();
    assert_eq!(state.reservation_store("nqn.one", 1, "inode 6 made at 9").load(), written);
    drop(state);
    let state = StateDirectory::open(root.path()).unwrap();
    assert_eq!(state.reservation_store("nqn.one", 1, "inode 6 made at 9").load(), written);
    assert!(state.reservation_store("nqn.one", 1, "inode 5 made at 9").load().is_err());
    for name in ["reservations-0-1", "lock", "../lock", "reservations-../lock"] {
        let state = StateDirectory::open(&root.path().join("other")).unwrap();
        let refused = state.adopt_records(&[name.to_owned()]).unwrap_err();
        assert!(refused.text.contains("it is not a reservation file in"), "{refused}");
    }
}

#[test]
fn disk_identity_with_control_characters_is_found_again() {
    let root = tempfile::tempdir().unwrap();
    let state = StateDirectory::open(root.path()).unwrap();
    let disk = "file:a\nb\u{85}c";
    let mut world = ReservationHost::new(state.reservation_store("nqn.one", 1, disk));
    world.submit_register(true);
    assert_eq!(world.await_completion(), Status::SUCCESS);
    let written = state.reservation_store("nqn.one", 1, disk).load();
    assert!(matches!(written, Ok(Some(_))), "{written:?}");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "it lays a file of an old version")]
fn format_1_file_is_rejected_with_the_adopt_option() {
    let root = tempfile::tempdir().unwrap();
    let name = super::record_file_name(OLD_NQN, 1);
    std::fs::write(root.path().join(&name), FORMAT_1).unwrap();
    let state = StateDirectory::open(root.path()).unwrap();
    let refused = state.reservation_store(OLD_NQN, 1, "inode 5").load().unwrap_err();
    assert!(refused.text.contains(&format!("--adopt-reservations {name}")), "{refused}");
    assert_eq!(std::fs::read(root.path().join(&name)).unwrap(), FORMAT_1);
    drop(state);
    let state = StateDirectory::open(root.path()).unwrap().adopt_records(&[name]).unwrap();
    let keeper = state.reservation_store(OLD_NQN, 1, "inode 5");
    assert!(matches!(keeper.load(), Ok(Some(_))));
    let world = ReservationHost::new(keeper);
    let reservation = world.controller.namespaces().reader().get().get(1).unwrap().reservation;
    assert!(reservation.is_some_and(|it| !it.is_holder && it.rejects_writes()), "{reservation:?}");
    assert!(
        state.reservation_store(OLD_NQN, 1, "inode 6").load().is_err(),
        "it is of that disk from now on"
    );
}

/// A power loss at any step of an adoption leaves the old or the new file.
#[test]
fn adoption_is_atomic_at_power_loss() {
    for steps in 0..=4 {
        for names_survive in [false, true] {
            let (disk, mut directory) = new_disk_and_record_file();
            directory.write_record(Some(b"a record")).unwrap();
            let other = RecordOwner { disk: "another".to_owned(), ..directory.owner.clone() };
            let mut adopted = RecordFile { owner: other, ..directory.clone() };
            disk.0.lock().unwrap().steps_left = steps;
            let ended = adopted.adopt_for_disk();
            disk.cut_power(names_survive, |bytes| bytes[..bytes.len() / 2].to_vec());
            disk.0.lock().unwrap().steps_left = usize::MAX;
            let [old, new] = [directory.read_record(), adopted.read_record()];
            assert!(old.is_ok() != new.is_ok(), "{steps}: {old:?} {new:?}");
            assert!(ended.is_err() || new.is_ok(), "{steps}: it was said to be done");
            assert_eq!(old.or(new), Ok(Some(b"a record".to_vec())));
            adopted.adopt_for_disk().unwrap();
            assert_eq!(adopted.read_record(), Ok(Some(b"a record".to_vec())));
        }
    }
}

#[test]
fn reservation_file_with_changed_header_is_rejected() {
    let (disk, mut directory) = new_disk_and_record_file();
    directory.write_record(Some(b"a record")).unwrap();
    let whole = disk.read("r").unwrap().unwrap();
    let lines_end = whole.len() - b"a record".len();
    for at in 0..lines_end {
        let mut changed = whole.clone();
        changed[at] ^= 0x10;
        disk.clone().write_pending("r", &changed).unwrap();
        assert!(directory.read_record().is_err(), "byte {at}");
        disk.clone().write_pending("r", &whole[..at]).unwrap();
        assert!(directory.read_record().is_err(), "{at} bytes");
    }
}
