//! vfio-user connection, shared by all threads of this process.
//!
//! A thread that waits for a reply also handles all other incoming messages; while no thread waits,
//! the admin thread does. A doorbell message is sent by the thread that rings it. The lock of the
//! connection is never held during a wait.
//!
//! ```text
//!   connected ── lost: sending direction closed ──▶ closing ── server has closed, too ──▶ ended
//! ```
//!
//! Memory is reusable only in the last state: a server closes its side after it has released the
//! memory. Until then it may still access what was mapped for it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use tenmil_base::{Memory, RegionId, Segment, Span};
use tenmil_dma::{FileRange, ForeignRegion, IovaAllocator, RegionTable};
use tenmil_linux::Clock;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_vfio_user::server::DmaMap;
use tenmil_vfio_user::{
    Client, ClientEvent, Errno, IrqAction, IrqSelection, IrqSet, RegionInfo, SparseMmapArea,
    VersionCapabilities, irq_index, region_index,
};

use super::vfio_user_uri::VfioUserUri;
use tenmil_base::Error;

/// Handle of the connection. Clones are cheap.
#[derive(Clone)]
pub(super) struct ConnectionHandle {
    shared: Arc<ConnectionShared>,
}

struct ConnectionShared {
    connection: LocalConnection,
    /// Ready when data have arrived, or when the socket has space for data that could not be sent.
    watch: PollSet,
    wire: Mutex<ConnectionState>,
    /// Held by the thread that waits for a reply.
    asking: Mutex<()>,
    clock: Clock,
    time_limit: Span,
    name: String,
}

struct ConnectionState {
    client: Client<Arc<OwnedFd>>,
    /// Replies that have arrived and not been consumed.
    replies: Vec<ClientEvent<Arc<OwnedFd>>>,
    /// Why the connection is lost.
    lost: Option<String>,
    /// The server has closed its side and released all memory.
    has_ended: bool,
    /// Events that the watch waits for.
    interest: Interest,
    regions: RegionTable,
    /// Unused IOVAs.
    space: IovaAllocator,
    /// Regions mapped for the server, which it may also access by messages.
    shown: Vec<MappedRegion>,
    buffer: Box<[u8]>,
}

/// A region mapped for the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MappedRegion {
    iova: u64,
    len_bytes: u64,
    region: RegionId,
}

/// Features of the server.
pub(super) struct ServerFeatures {
    /// Mapped page with the doorbells, if the server offers one, and its place in BAR 0.
    pub(super) doorbells: Option<(Arc<ForeignRegion>, SparseMmapArea)>,
    /// Number of MSI-X vectors.
    pub(super) vectors: u32,
    /// Offset of the MSI-X table in BAR 0. Zero if there is none there.
    pub(super) table_offset: u32,
}

/// Result of a request, with the reason of a failure.
pub(super) type ReplyResult<T> = Result<T, Error>;

const BUFFER_BYTES: usize = 256 << 10;
/// Maximum number of reads from the socket in one call.
const READS_MAX: usize = 16;
const READABLE: Interest = Interest { readable: true, writable: false };
/// Hang-up is reported without being requested.
const END: Interest = Interest { readable: false, writable: false };
/// IOVA range for mappings, above the addresses that a virtual machine of the server may use
/// itself.
const ADDRESSES: (u64, u64) = (1 << 36, (1 << 47) - 1);
/// Offset of the Command register (PCI 3.0 §6.2.2).
const COMMAND: usize = 4;
/// Memory Space, Bus Master, and Interrupt Disable. Only MSI-X is used, and some servers otherwise
/// try to signal INTx, for which no descriptor is set.
const COMMAND_SET: u16 = 1 << 1 | 1 << 2 | 1 << 10;
/// Class code in bytes 9 to 11: NVM Express I/O controller.
const NVM_EXPRESS: [u8; 3] = [0x02, 0x08, 0x01];
const MSIX: u8 = 0x11;
/// Offset of the doorbells in BAR 0 (PCIe Transport 1.0 §3.1.2).
const DOORBELLS: u64 = 0x1000;

impl ConnectionHandle {
    /// Connects and reads the properties of the device. All waits have a timeout.
    pub(super) fn connect(
        name: &VfioUserUri,
        regions: &RegionTable,
        clock: Clock,
    ) -> Result<(Self, ServerFeatures), Error> {
        let shown = name.without_options();
        let connection =
            LocalConnection::connect(&name.path, name.wanted.time_limit).map_err(|error| {
                let text = format!("attach {shown}: {error}");
                match error.kind() {
                    std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => {
                        let hint =
                            format!("Start its server: `tenmil serve URI --listen {shown}`.");
                        Error { hint: Some(hint), ..Error::usage(text) }
                    }
                    _ => Error::environment(text),
                }
            })?;
        let watch = PollSet::new().and_then(|watch| {
            watch.add(&connection, 0, READABLE)?;
            Ok(watch)
        });
        let watch =
            watch.map_err(|error| Error::environment(format!("attach {shown}: {error}")))?;
        let wire = ConnectionState {
            client: Client::new(),
            replies: Vec::new(),
            lost: None,
            has_ended: false,
            interest: READABLE,
            regions: regions.clone(),
            space: IovaAllocator::new([ADDRESSES]),
            shown: Vec::new(),
            buffer: vec![0; BUFFER_BYTES].into(),
        };
        let (wire, asking, time_limit) = (Mutex::new(wire), Mutex::new(()), name.wanted.time_limit);
        let name = shown.clone();
        let shared = ConnectionShared { connection, watch, wire, asking, clock, time_limit, name };
        let link = Self { shared: Arc::new(shared) };
        let offer = link.read_device_info(regions);
        let offer = offer.map_err(|why| Error::remote(format!("attach {shown}: {why}")))?;
        Ok((link, offer))
    }

    /// Name of the device.
    pub(super) fn name(&self) -> &str {
        &self.shared.name
    }

    /// Descriptor that becomes readable when [`drive_io`](Self::drive_io) has work.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.watch.as_fd()
    }

    /// Why the connection is lost, if it is.
    pub(super) fn lost_reason(&self) -> Option<String> {
        self.lock().lost.clone()
    }

    /// Marks the connection as lost. The server may access memory until it [has
    /// ended](Self::has_server_closed).
    pub(super) fn mark_lost(&self, why: &str) {
        self.lock().mark_lost(&self.shared, why);
    }

    /// Whether the server has closed its side, and has thereby released all memory.
    pub(super) fn has_server_closed(&self) -> bool {
        let mut wire = self.lock();
        let _ = wire.drive_io(&self.shared);
        wire.has_ended
    }

    /// Receives and sends pending messages, unless a thread that waits for a reply does so already.
    pub(super) fn drive_io(&self) {
        // The guard is kept during the call: a thread that starts to wait meanwhile would not be
        // woken for messages that are received here.
        let exchange = self.shared.asking.try_lock();
        if !matches!(exchange, Err(TryLockError::WouldBlock)) {
            let _ = self.lock().drive_io(&self.shared);
        }
    }

    /// Reads from a region of the device.
    pub(super) fn read(&self, region: u32, offset: u64, len_bytes: u32) -> ReplyResult<Vec<u8>> {
        let _exchange = self.lock_exchange();
        let id = self.lock().client.request_region_read(region, offset, len_bytes);
        match self.wait(|reply| is_reply_to(reply, id))? {
            ClientEvent::Data { data, .. } => Ok(data),
            other => Err(Error::environment(unexpected_reply_text(other))),
        }
    }

    /// Writes to a region of the device without waiting. The write precedes all later requests.
    pub(super) fn write_device_region_no_reply(&self, region: u32, offset: u64, data: &[u8]) {
        let mut wire = self.lock();
        if wire.lost.is_none() {
            wire.client.write_region_without_reply(region, offset, data);
            let _ = wire.send(&self.shared);
        }
    }

    /// Maps a region for the server, by its descriptor, or by messages if it has none. Returns its
    /// IOVA.
    pub(super) fn map_region(&self, region: RegionId) -> ReplyResult<u64> {
        let _exchange = self.lock_exchange();
        let mut wire = self.lock();
        if let Some(shown) = wire.shown.iter().find(|shown| shown.region == region) {
            return Ok(shown.iova);
        }
        if let Some(why) = &wire.lost {
            return Err(Error::environment(why.clone()));
        }
        let len_bytes = wire.regions.len_bytes(region);
        let iova = wire.space.allocate_range(len_bytes).filter(|_| len_bytes > 0);
        let iova = iova
            .ok_or("there is no such region, or no row of addresses for it")
            .map_err(Error::environment)?;
        let shown = MappedRegion { iova, len_bytes, region };
        let file = wire.regions.descriptor(region).map(Arc::new);
        let (is_readable, is_writable) = (true, true);
        let map = DmaMap { iova, len_bytes, file_offset: 0, is_readable, is_writable };
        let id = wire.client.request_dma_map(map, file);
        // Recorded before the reply: the server may have mapped the region already.
        wire.shown.push(shown);
        drop(wire);
        let done = self.wait_for_success(id);
        if done.is_err() && self.lost_reason().is_none() {
            self.lock().forget(shown);
        }
        done.map(|()| iova)
    }

    /// Unmaps a region. The server cannot access it once this has returned successfully.
    pub(super) fn unmap_region(&self, region: RegionId) -> ReplyResult<()> {
        // A region that is not mapped needs no request, and must not wait for the lock.
        if self.lock().find_mapping(region).is_none() {
            return Ok(());
        }
        let _exchange = self.lock_exchange();
        let mut wire = self.lock();
        let Some(shown) = wire.find_mapping(region) else { return Ok(()) };
        if let Some(why) = wire.lost.clone() {
            drop(wire);
            return if self.has_server_closed() { Ok(()) } else { Err(Error::environment(why)) };
        }
        let id = wire.client.request_dma_unmap(shown.iova, shown.len_bytes);
        drop(wire);
        let done = self.wait_for_success(id);
        if done.is_err() && !self.has_server_closed() {
            return done;
        }
        self.lock().forget(shown);
        Ok(())
    }

    /// Assigns an event descriptor to an MSI-X vector.
    pub(super) fn set_vector(&self, vector: u16, descriptor: BorrowedFd<'_>) -> ReplyResult<()> {
        let file = descriptor.try_clone_to_owned().map_err(Error::environment)?;
        let _exchange = self.lock_exchange();
        let id = self.lock().client.request_set_irqs(IrqSet {
            index: irq_index::MSIX,
            start: vector.into(),
            count: 1,
            action: IrqAction::Trigger,
            data: IrqSelection::Files(vec![Arc::new(file)]),
        });
        self.wait_for_success(id)
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.shared.wire.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serializes requests.
    fn lock_exchange(&self) -> MutexGuard<'_, ()> {
        self.shared.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for_success(&self, id: u16) -> ReplyResult<()> {
        match self.wait(|reply| is_reply_to(reply, id))? {
            ClientEvent::Done { .. } => Ok(()),
            other => Err(Error::environment(unexpected_reply_text(other))),
        }
    }

    /// Waits for a reply. The caller must hold the request lock.
    fn wait(
        &self,
        is_it: impl Fn(&ClientEvent<Arc<OwnedFd>>) -> bool,
    ) -> ReplyResult<ClientEvent<Arc<OwnedFd>>> {
        let end = self.shared.clock.now().after(self.shared.time_limit);
        let mut ready = Vec::new();
        loop {
            let mut wire = self.lock();
            wire.drive_io(&self.shared)?;
            if let Some(at) = wire.replies.iter().position(&is_it) {
                return Ok(wire.replies.swap_remove(at));
            }
            let now = self.shared.clock.now();
            if now >= end {
                let why = format!("no response within {}", self.shared.time_limit);
                wire.mark_lost(&self.shared, &why);
                return Err(Error::environment(why));
            }
            drop(wire);
            let waited = self.shared.watch.wait(Some(end.since(now)), &mut ready);
            waited.map_err(Error::environment)?;
        }
    }

    /// Negotiates the version and reads the properties of the device.
    fn read_device_info(&self, regions: &RegionTable) -> ReplyResult<ServerFeatures> {
        let exchange = self.lock_exchange();
        let ends = |reply: &ClientEvent<_>| matches!(reply, ClientEvent::Refused { .. });
        let wants =
            |reply: &ClientEvent<_>| matches!(reply, ClientEvent::Version(_)) || ends(reply);
        match self.wait(wants)? {
            ClientEvent::Version(_) => {}
            ClientEvent::Refused { error: Errno::BUSY, .. } => {
                return Err(Error::environment("another client has it, expected none".to_owned()));
            }
            other => return Err(Error::environment(unexpected_reply_text(other))),
        }
        self.lock().client.request_device_info();
        let wants =
            |reply: &ClientEvent<_>| matches!(reply, ClientEvent::Device { .. }) || ends(reply);
        let ClientEvent::Device { regions: count, irqs, can_reset } = self.wait(wants)? else {
            return Err(Error::environment("it does not describe the device".to_owned()));
        };
        if count <= region_index::CONFIGURATION || irqs <= irq_index::MSIX {
            return Err(Error::environment(format!(
                "{count} regions and {irqs} interrupts, expected a PCI device"
            )));
        }
        self.lock().client.request_region_info(region_index::BAR0);
        let wants =
            |reply: &ClientEvent<_>| matches!(reply, ClientEvent::Region { .. }) || ends(reply);
        let ClientEvent::Region { shape: bar, file, .. } = self.wait(wants)? else {
            return Err(Error::environment("it does not describe BAR 0".to_owned()));
        };
        self.lock().client.request_irq_info(irq_index::MSIX);
        let wants =
            |reply: &ClientEvent<_>| matches!(reply, ClientEvent::Irqs { .. }) || ends(reply);
        let ClientEvent::Irqs { shape: msix, .. } = self.wait(wants)? else {
            return Err(Error::environment("it does not describe its interrupts".to_owned()));
        };
        // A previous client may have left the controller enabled.
        if can_reset {
            let id = self.lock().client.request_reset();
            self.wait_for_success(id)?;
        }
        drop(exchange);
        let table_offset = self.check_nvme_and_enable_dma(&bar)?;
        let doorbells = doorbells_of(regions, &bar, file);
        Ok(ServerFeatures { doorbells, vectors: msix.count, table_offset })
    }

    /// Checks that the device is an NVMe controller and enables DMA. Returns the offset of its
    /// MSI-X table.
    fn check_nvme_and_enable_dma(&self, bar: &RegionInfo) -> ReplyResult<u32> {
        let space = self.read(region_index::CONFIGURATION, 0, 256)?;
        if space[9..12] != NVM_EXPRESS {
            let [interface, subclass, class] = [space[9], space[10], space[11]];
            return Err(Error::environment(format!(
                "class {class:02x}{subclass:02x}{interface:02x}, expected 010802, an NVMe controller"
            )));
        }
        let command = u16::from_le_bytes([space[COMMAND], space[COMMAND + 1]]) | COMMAND_SET;
        self.write_device_region_no_reply(
            region_index::CONFIGURATION,
            COMMAND as u64,
            &command.to_le_bytes(),
        );
        let mut at = usize::from(space[0x34]);
        for _ in 0..48 {
            let Some(capability) = space.get(at..at + 12).filter(|_| at >= 0x40) else { break };
            if capability[0] == MSIX {
                let [a, b, c, d] = [4, 5, 6, 7].map(|byte| capability[byte]);
                let place = u32::from_le_bytes([a, b, c, d]);
                // A table in another BAR is not accessible here.
                let is_inside = place & 7 == 0 && u64::from(place) < bar.size;
                return Ok(if is_inside { place } else { 0 });
            }
            at = usize::from(capability[1]);
        }
        Ok(0)
    }
}

impl ConnectionState {
    /// Mapping of a region, if there is one.
    fn find_mapping(&self, region: RegionId) -> Option<MappedRegion> {
        let shown = self.shown.iter().find(|shown| shown.region == region);
        shown.filter(|_| !self.has_ended).copied()
    }

    fn mark_lost(&mut self, shared: &ConnectionShared, why: &str) {
        if self.lost.is_none() {
            self.lost = Some(why.to_owned());
            // Fails if the server has closed already, which is fine.
            let _ = shared.connection.shutdown_write();
            self.set_poll_interest(shared, END);
        }
    }

    fn drive_io(&mut self, shared: &ConnectionShared) -> ReplyResult<()> {
        if self.lost.is_none() {
            self.send(shared)?;
        }
        for _ in 0..READS_MAX {
            if self.lost.is_some() {
                break;
            }
            let wanted = self.client.receive_len().min(self.buffer.len());
            if wanted == 0 {
                return Ok(());
            }
            let (mut files, most) = (Vec::new(), VersionCapabilities::OURS.files_max as usize);
            let buffer = &mut self.buffer[..wanted];
            match shared.connection.receive_files(buffer, &mut files, most) {
                Ok(RecvResult::WouldBlock) => return Ok(()),
                Ok(RecvResult::Bytes(count)) => {
                    let files = files.into_iter().map(Arc::new);
                    match self.client.handle_received(&self.buffer[..count], files) {
                        Ok(None) => {}
                        Ok(Some(reply)) => self.handle_client_event(shared, reply)?,
                        Err(violation) => self.mark_lost(shared, &violation.to_string()),
                    }
                }
                Ok(RecvResult::Eof) => self.handle_server_close(shared),
                Err(error) => self.mark_lost(shared, &error.to_string()),
            }
        }
        match self.lost.clone() {
            None => Ok(()),
            Some(why) => {
                self.discard_until_server_closes(shared);
                Err(Error::environment(why))
            }
        }
    }

    /// Discards incoming data until the server closes, so that it does not block on a full socket.
    fn discard_until_server_closes(&mut self, shared: &ConnectionShared) {
        for _ in 0..READS_MAX {
            if self.has_ended {
                return;
            }
            match shared.connection.receive(&mut self.buffer) {
                Ok(RecvResult::Bytes(_)) => {}
                Ok(RecvResult::WouldBlock) | Err(_) => return,
                Ok(RecvResult::Eof) => self.handle_server_close(shared),
            }
        }
    }

    fn handle_server_close(&mut self, shared: &ConnectionShared) {
        self.mark_lost(shared, "the server process has ended");
        self.has_ended = true;
        // A closed socket would be ready for ever.
        let _ = shared.watch.remove(&shared.connection);
    }

    fn send(&mut self, shared: &ConnectionShared) -> ReplyResult<()> {
        while let Some(outgoing) = self.client.next_outgoing() {
            if let Some(why) = &self.lost {
                return Err(Error::environment(why.clone()));
            }
            let files: Vec<BorrowedFd<'_>> =
                outgoing.files.iter().map(|file| file.as_fd()).collect();
            match shared.connection.send_files(outgoing.bytes, &files) {
                Ok(0) => break,
                Ok(sent) => self.client.record_sent(sent),
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                    self.mark_lost(shared, "the server process has ended");
                }
                Err(error) => self.mark_lost(shared, &error.to_string()),
            }
        }
        if self.lost.is_none() {
            let writable = self.client.next_outgoing().is_some();
            let readable = self.client.receive_len() > 0;
            self.set_poll_interest(shared, Interest { readable, writable });
        }
        Ok(())
    }

    fn set_poll_interest(&mut self, shared: &ConnectionShared, interest: Interest) {
        if self.interest != interest {
            self.interest = interest;
            // Changing an existing entry of the set needs no memory and cannot fail.
            let _ = shared.watch.modify(&shared.connection, 0, interest);
        }
    }

    /// Stores a reply for the thread that waits for it, and serves memory accesses of the server.
    fn handle_client_event(
        &mut self,
        shared: &ConnectionShared,
        reply: ClientEvent<Arc<OwnedFd>>,
    ) -> ReplyResult<()> {
        match reply {
            ClientEvent::DmaRead { call, iova, len_bytes } => {
                let mut data = vec![0; len_bytes as usize];
                let segment = self.segment(iova, len_bytes);
                match segment.and_then(|segment| self.regions.load(segment, &mut data).ok()) {
                    Some(()) => self.client.reply_dma_read(call, &data),
                    None => self.client.reject_dma(call, Errno::FAULT),
                }
            }
            ClientEvent::DmaWrite { call, iova, data } => {
                let len_bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
                let segment = self.segment(iova, len_bytes);
                match segment.and_then(|segment| self.regions.store(segment, &data).ok()) {
                    Some(()) => self.client.reply_dma_write(call),
                    None => self.client.reject_dma(call, Errno::FAULT),
                }
            }
            other => {
                self.replies.push(other);
                return Ok(());
            }
        }
        self.send(shared)
    }

    fn forget(&mut self, shown: MappedRegion) {
        self.shown.retain(|other| *other != shown);
        self.space.free_range(shown.iova, shown.len_bytes);
    }

    fn segment(&self, iova: u64, len_bytes: u32) -> Option<Segment> {
        let around = |shown: &&MappedRegion| {
            let skip = iova.wrapping_sub(shown.iova);
            skip < shown.len_bytes && u64::from(len_bytes) <= shown.len_bytes - skip
        };
        let shown = self.shown.iter().find(around)?;
        Some(Segment { region: shown.region, offset: iova - shown.iova, len_bytes })
    }
}

fn is_reply_to<F>(reply: &ClientEvent<F>, wanted: u16) -> bool {
    match reply {
        ClientEvent::Done { id }
        | ClientEvent::Refused { id, .. }
        | ClientEvent::Data { id, .. } => *id == wanted,
        _ => false,
    }
}

fn unexpected_reply_text<F>(reply: ClientEvent<F>) -> String {
    match reply {
        ClientEvent::Refused { command, error, .. } => format!("{command} was refused: {error}"),
        _ => "a reply to another request".to_owned(),
    }
}

/// Maps the part of BAR 0 with the doorbells, if the server offers it.
fn doorbells_of(
    regions: &RegionTable,
    bar: &RegionInfo,
    file: Option<Arc<OwnedFd>>,
) -> Option<(Arc<ForeignRegion>, SparseMmapArea)> {
    let area = bar.areas.iter().find(|area| area.offset <= DOORBELLS && area.size > 0);
    let (area, file) = area.copied().zip(file)?;
    let offset = bar.file_offset.checked_add(area.offset);
    let part = FileRange { offset: offset.unwrap_or(u64::MAX), len_bytes: area.size };
    // If it cannot be mapped, doorbells are written by messages.
    let adopted = regions.map_foreign(file.as_fd(), part).ok()?;
    Some((Arc::new(adopted), area))
}
