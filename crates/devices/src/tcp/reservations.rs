//! The reservation of a namespace over NVMe/TCP, by a queue that is connected for the purpose.

use tenmil_base::{CompletionBatch, Error, Instant, IoStatus, Memory, ReservationHolder, Span};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::Clock;
use tenmil_nvme_fabrics::FabricsQueuePair;
use tenmil_wire::Layout as _;
use tenmil_wire::TypedCommand as _;
use tenmil_wire::io::reservation::{
    AcquireAction, AcquireKeys, ChangePersistence, RegisterAction, RegisterKeys,
    ReservationAcquire, ReservationRegister, ReservationReport, ReservationStatusExtended,
    ReservationType, report_registrants_extended,
};

use super::fabrics_controller::AttachedFabricsController;
use super::tcp_uri::TcpUri;

/// What reservation commands to a namespace need to know.
#[derive(Clone, Debug)]
pub(super) struct ReservableNamespace {
    name: String,
    nsid: u32,
    host_id: [u8; 16],
    /// Reservations persist through a loss of power, if asked to (RESCAP.PTPLS).
    persists: bool,
    regions: RegionTable,
    clock: Clock,
}

/// A queue for reservation commands.
pub(super) struct ReservationQueue {
    queue: FabricsQueuePair,
    /// The controller, which was attached for the purpose. Dropped after the queue.
    _attached: AttachedFabricsController,
}

/// One exchange of reservation commands.
struct ReservationCommands<'a> {
    namespace: &'a ReservableNamespace,
    queue: ReservationQueue,
    memory: Region,
}

/// RESCAP: Write Exclusive, and Persist Through Power Loss (NVM 1.1 §4.1.5.1).
const WRITE_EXCLUSIVE: u8 = 1 << 1;
const PERSISTS: u8 = 1;
/// Bytes of a report: the header and 255 registrants.
const REPORT_BYTES: u32 = 16 << 10;
const KEYS_BYTES: u32 = 16;
/// How long a command may take: Preempt and Abort waits for the commands of another host.
const COMMAND_MAX: Span = Span::from_secs(30);

impl ReservableNamespace {
    /// The namespace of a name, if its reservations (RESCAP) exclude other hosts from writing.
    pub(super) fn from_name(
        name: &TcpUri,
        rescap: u8,
        regions: &RegionTable,
        clock: Clock,
    ) -> Option<Self> {
        (rescap & WRITE_EXCLUSIVE != 0).then(|| Self {
            name: format!("tcp://{}/{}", name.address, name.options.subsystem),
            nsid: name.namespace,
            host_id: name.options.host_id,
            persists: rescap & PERSISTS != 0,
            regions: regions.clone(),
            clock,
        })
    }

    pub(super) fn holder(
        &self,
        queue: ReservationQueue,
    ) -> Result<Option<ReservationHolder>, Error> {
        ReservationCommands::new(self, queue)?.holder()
    }

    pub(super) fn acquire(
        &self,
        queue: ReservationQueue,
        key: u64,
        preempted: Option<u64>,
    ) -> Result<bool, Error> {
        let mut exchange = ReservationCommands::new(self, queue)?;
        let cptpl = match self.persists {
            true => ChangePersistence::Persist,
            false => ChangePersistence::None,
        };
        let rrega = RegisterAction::Register;
        let register = ReservationRegister { nsid: self.nsid, rrega, cptpl, ..Default::default() };
        if !exchange.register("Reservation Register", register, (0, key))? {
            // This host has another key: that of a former process.
            let rrega = RegisterAction::Replace;
            let replace = ReservationRegister { rrega, iekey: true, ..register };
            exchange.expect_register("Reservation Register (replace)", replace, (0, key))?;
        }
        if exchange.reserve(key, preempted)? && exchange.holds(key)? {
            return Ok(true);
        }
        let rrega = RegisterAction::Unregister;
        let unregister = ReservationRegister { nsid: self.nsid, rrega, ..Default::default() };
        exchange.register("Reservation Register (unregister)", unregister, (key, 0))?;
        Ok(false)
    }

    pub(super) fn release(&self, queue: ReservationQueue, key: u64) -> Result<(), Error> {
        let mut exchange = ReservationCommands::new(self, queue)?;
        let rrega = RegisterAction::Unregister;
        let unregister = ReservationRegister { nsid: self.nsid, rrega, ..Default::default() };
        // To unregister the holder releases the reservation (Base 2.1 §8.1.22.4).
        exchange.register("Reservation Register (unregister)", unregister, (key, 0)).map(|_| ())
    }
}

impl<'a> ReservationCommands<'a> {
    fn new(namespace: &'a ReservableNamespace, queue: ReservationQueue) -> Result<Self, Error> {
        let memory = namespace.regions.allocate_region(REPORT_BYTES as usize);
        let memory = memory
            .map_err(|error| format!("{}: {error}", namespace.name))
            .map_err(Error::environment)?;
        Ok(Self { namespace, queue, memory })
    }

    fn holder(&mut self) -> Result<Option<ReservationHolder>, Error> {
        let ReservableNamespace { nsid, host_id, .. } = *self.namespace;
        let report =
            ReservationReport { nsid, numd: REPORT_BYTES / 4 - 1, eds: true, ..Default::default() };
        let what = "Reservation Report";
        let status = self.send(what, report.to_command(), REPORT_BYTES)?;
        if !status.is_success() {
            return Err(Error::environment(self.failure_text(what, status)));
        }
        let mut bytes = vec![0; REPORT_BYTES as usize];
        let segment = self.memory.segment().slice(0, REPORT_BYTES).unwrap_or_default();
        let loaded = self.namespace.regions.load(segment, &mut bytes);
        loaded
            .map_err(|_| format!("{}: {what}: its memory was freed", self.namespace.name))
            .map_err(Error::environment)?;
        let header = ReservationStatusExtended::parse(&bytes);
        let rtype = header.map_or(ReservationType::None, |header| header.rtype());
        let mut holders: Vec<_> =
            report_registrants_extended(&bytes).filter(|row| row.holds()).collect();
        // Of a reservation that all registrants hold, this host's comes first.
        holders.sort_by_key(|row| row.hostid() != host_id);
        let Some(holder) = holders.first().filter(|_| rtype != ReservationType::None) else {
            return match rtype {
                ReservationType::None => Ok(None),
                _ => Err(Error::environment(format!(
                    "{}: {what}: found a reservation and no holder among the first {} registrants, \
                     expected one",
                    self.namespace.name,
                    report_registrants_extended(&bytes).count()
                ))),
            };
        };
        Ok(Some(ReservationHolder {
            is_this_host: holder.hostid() == host_id,
            is_write_exclusive: rtype == ReservationType::WriteExclusive,
            key: holder.rkey(),
            host: uuid_text(&holder.hostid()),
        }))
    }

    fn holds(&mut self, key: u64) -> Result<bool, Error> {
        let holder = self.holder()?;
        Ok(holder.is_some_and(|it| it.is_this_host && it.is_write_exclusive && it.key == key))
    }

    /// False if another host has the reservation.
    fn reserve(&mut self, key: u64, preempted: Option<u64>) -> Result<bool, Error> {
        let (racqa, what) = match preempted {
            Some(_) => (AcquireAction::PreemptAndAbort, "Reservation Acquire (preempt and abort)"),
            None => (AcquireAction::Acquire, "Reservation Acquire"),
        };
        let rtype = ReservationType::WriteExclusive;
        let nsid = self.namespace.nsid;
        let command = ReservationAcquire { nsid, racqa, rtype, ..Default::default() };
        let keys = AcquireKeys::zeroed();
        let keys = keys.with(|keys| keys.crkey(key).prkey(preempted.unwrap_or(0)));
        self.store(keys.as_bytes())?;
        self.succeeds_without_conflict(what, command.to_command())
    }

    /// False if this host is registered under another key, or is not registered.
    fn register(
        &mut self,
        what: &str,
        command: ReservationRegister,
        (current, new): (u64, u64),
    ) -> Result<bool, Error> {
        let keys = RegisterKeys::zeroed().with(|keys| keys.crkey(current).nrkey(new));
        self.store(keys.as_bytes())?;
        self.succeeds_without_conflict(what, command.to_command())
    }

    fn expect_register(
        &mut self,
        what: &str,
        command: ReservationRegister,
        keys: (u64, u64),
    ) -> Result<(), Error> {
        match self.register(what, command, keys)? {
            true => Ok(()),
            false => {
                Err(Error::environment(self.failure_text(what, IoStatus::RESERVATION_CONFLICT)))
            }
        }
    }

    fn store(&self, bytes: &[u8]) -> Result<(), Error> {
        let segment = self.memory.segment().slice(0, KEYS_BYTES).unwrap_or_default();
        let stored = self.namespace.regions.store(segment, bytes);
        stored
            .map_err(|_| format!("{}: store a key: its memory was freed", self.namespace.name))
            .map_err(Error::environment)
    }

    /// Sends a command with two keys. False if it ends with Reservation Conflict.
    fn succeeds_without_conflict(
        &mut self,
        what: &str,
        command: tenmil_wire::Command,
    ) -> Result<bool, Error> {
        match self.send(what, command, KEYS_BYTES)? {
            IoStatus::SUCCESS => Ok(true),
            status if status.is_conflict() => Ok(false),
            status => Err(Error::environment(self.failure_text(what, status))),
        }
    }

    /// Sends a command, and waits for its completion.
    fn send(
        &mut self,
        what: &str,
        command: tenmil_wire::Command,
        len_bytes: u32,
    ) -> Result<IoStatus, Error> {
        let ReservableNamespace { name, clock, .. } = self.namespace;
        let data = self.memory.segment().slice(0, len_bytes).unwrap_or_default();
        let queue = &mut self.queue.queue;
        let end: Instant = clock.now().after(COMMAND_MAX);
        let mut completions = CompletionBatch::with_capacity(1);
        let mut is_sent = false;
        loop {
            let now = clock.now();
            if !is_sent {
                let sent = queue.driver_queue().submit_raw(
                    now,
                    1,
                    command,
                    &[data],
                    &[],
                    Some(COMMAND_MAX),
                );
                match sent {
                    Ok(()) => is_sent = true,
                    Err(tenmil_nvme_host::RawSubmitError::Full) => {}
                    Err(refused) => {
                        return Err(Error::environment(format!("{name}: {what}: {refused}")));
                    }
                }
            }
            queue.poll_raw(now, &mut completions);
            queue.flush();
            if let [completion] = completions.as_slice() {
                return Ok(completion.status);
            }
            if now >= end {
                return Err(Error::environment(format!(
                    "{name}: {what}: no response within {COMMAND_MAX}"
                )));
            }
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    fn failure_text(&self, what: &str, status: IoStatus) -> String {
        let status = tenmil_wire::Status(status.0);
        format!("{}: {what}: {status}, expected success", self.namespace.name)
    }
}

impl Drop for ReservationCommands<'_> {
    /// Waits until nothing touches its memory any more.
    fn drop(&mut self) {
        let clock = self.namespace.clock;
        while !self.queue.queue.drain(clock.now()) {
            tenmil_linux::named_thread::yield_cpu();
        }
    }
}

impl ReservationQueue {
    /// A queue of a controller that stays attached for as long as the queue is there.
    pub(super) fn from_attached(attached: AttachedFabricsController) -> Result<Self, Error> {
        let queue = attached.connect_queue_pair()?;
        Ok(Self { queue, _attached: attached })
    }
}

fn uuid_text(id: &[u8; 16]) -> String {
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}
