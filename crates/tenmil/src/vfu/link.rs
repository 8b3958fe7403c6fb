//! The connection to the other process, as all threads of this one share it.
//!
//! Whoever waits for an answer carries whatever else comes meanwhile; while nobody waits, the thread
//! that tends the controller does. A doorbell that is a message is sent by whoever rings it, and waits
//! for nobody: the lock is never held while anything is waited for.
//!
//! ```text
//!   heard ── lost: we send no more, and say so ──▶ leaving ── the other side has closed, too ──▶ ended
//! ```
//!
//! Only at the end is our memory ours again: a server closes when it has let go of it, and one that is
//! stopped meanwhile may still go on with what it was given.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use base::{Memory, RegionId, Segment, Span};
use dma::{AddressSpace, Adopted, FilePart, Regions};
use host::Clock;
use host::local_socket::{Connection, Received};
use host::watch::{Interest, Watch};
use vfu::server::DmaMap;
use vfu::{
    Answer, Area, Capabilities, Client, Errno, IrqAction, IrqData, IrqSet, RegionShape, irq_index,
    region_index,
};

use super::name::VfuName;
use crate::Refused;

/// A handle on the connection. Cheap to clone.
#[derive(Clone)]
pub(super) struct Link {
    shared: Arc<Shared>,
}

struct Shared {
    connection: Connection,
    /// Ready when something has come, or there is room for what could not be sent.
    watch: Watch,
    wire: Mutex<Wire>,
    /// Held by whoever waits for an answer.
    asking: Mutex<()>,
    clock: Clock,
    patience: Span,
    name: String,
}

struct Wire {
    client: Client<Arc<OwnedFd>>,
    /// What has come and is awaited.
    answers: Vec<Answer<Arc<OwnedFd>>>,
    /// Why it is over.
    lost: Option<String>,
    /// The other side has closed, and has let go of our memory.
    has_ended: bool,
    /// What the watch waits for.
    interest: Interest,
    regions: Regions,
    /// Addresses that nothing has.
    space: AddressSpace,
    /// Memory that the other side may ask for by message, by its address.
    shown: Vec<Shown>,
    buffer: Box<[u8]>,
}

/// A region that the other side knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shown {
    iova: u64,
    len_bytes: u64,
    region: RegionId,
}

/// What the other side offers.
pub(super) struct Offer {
    /// The part of it with doorbells, if it can be mapped, and where in BAR 0 it begins.
    pub(super) doorbells: Option<(Arc<Adopted>, Area)>,
    /// How many vectors.
    pub(super) vectors: u32,
    /// Where in BAR 0 their table lies.
    pub(super) table_offset: u32,
}

/// How a question ended.
pub(super) type Replied<T> = Result<T, String>;

const BUFFER_BYTES: usize = 256 << 10;
/// So often the socket is read from before others have their turn.
const READS_MAX: usize = 16;
const READABLE: Interest = Interest { readable: true, writable: false };
/// The end is told without being asked for.
const END: Interest = Interest { readable: false, writable: false };
/// Where memory is shown: far from what a machine of the other side may have of its own.
const ADDRESSES: (u64, u64) = (1 << 36, (1 << 47) - 1);
/// The command register (PCI 3.0 §6.2.2).
const COMMAND: usize = 4;
/// Memory space, bus master, and interrupt disable: MSI-X is used alone, and some targets look for a
/// descriptor for INTx, which nobody sets, until this forbids it.
const COMMAND_SET: u16 = 1 << 1 | 1 << 2 | 1 << 10;
/// Class code, from byte 9 on: an NVM Express I/O controller.
const NVM_EXPRESS: [u8; 3] = [0x02, 0x08, 0x01];
const MSIX: u8 = 0x11;
/// Where doorbells begin.
const DOORBELLS: u64 = 0x1000;

impl Link {
    /// Connects, and finds out what the device is like. All of that has a limit.
    pub(super) fn connect(
        name: &VfuName,
        regions: &Regions,
        clock: Clock,
    ) -> Result<(Self, Offer), Refused> {
        let shown = name.shown();
        let connection =
            Connection::connect(&name.path, name.wanted.patience).map_err(|error| {
                let text = format!("attach {shown}: {error}");
                match error.kind() {
                    std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => {
                        let hint = format!(
                            "Start whoever serves it: `tenmil serve URI --listen {shown}`."
                        );
                        Refused { hint: Some(hint), ..Refused::caller(text) }
                    }
                    _ => Refused::machine(text),
                }
            })?;
        let watch = Watch::new().and_then(|watch| {
            watch.add(&connection, 0, READABLE)?;
            Ok(watch)
        });
        let watch = watch.map_err(|error| Refused::machine(format!("attach {shown}: {error}")))?;
        let wire = Wire {
            client: Client::new(),
            answers: Vec::new(),
            lost: None,
            has_ended: false,
            interest: READABLE,
            regions: regions.clone(),
            space: AddressSpace::new([ADDRESSES]),
            shown: Vec::new(),
            buffer: vec![0; BUFFER_BYTES].into(),
        };
        let (wire, asking, patience) = (Mutex::new(wire), Mutex::new(()), name.wanted.patience);
        let name = shown.clone();
        let shared = Shared { connection, watch, wire, asking, clock, patience, name };
        let link = Self { shared: Arc::new(shared) };
        let offer = link.explore(regions);
        let offer = offer.map_err(|why| Refused::peer(format!("attach {shown}: {why}")))?;
        Ok((link, offer))
    }

    /// What it is called.
    pub(super) fn name(&self) -> &str {
        &self.shared.name
    }

    /// What becomes readable when [`carry`](Self::carry) has something to do.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.watch.as_fd()
    }

    /// Why it is over, if it is.
    pub(super) fn lost(&self) -> Option<String> {
        self.lock().lost.clone()
    }

    /// Ends it. The other side may reach our memory until it [has ended](Self::has_ended), too.
    pub(super) fn lose(&self, why: &str) {
        self.lock().lose(&self.shared, why);
    }

    /// Whether the other side has closed, and with that has let go of our memory.
    pub(super) fn has_ended(&self) -> bool {
        let mut wire = self.lock();
        let _ = wire.carry(&self.shared);
        wire.has_ended
    }

    /// Takes what has come, and sends what is to be sent, unless somebody is about it who waits for
    /// an answer.
    pub(super) fn carry(&self) {
        // Held meanwhile: whoever began to wait now would not be woken by what is taken here.
        let turn = self.shared.asking.try_lock();
        if !matches!(turn, Err(TryLockError::WouldBlock)) {
            let _ = self.lock().carry(&self.shared);
        }
    }

    /// Reads a register.
    pub(super) fn read(&self, region: u32, offset: u64, len_bytes: u32) -> Replied<Vec<u8>> {
        let _turn = self.turn();
        let id = self.lock().client.read(region, offset, len_bytes);
        match self.wait(|answer| is_answer_to(answer, id))? {
            Answer::Data { data, .. } => Ok(data),
            other => Err(refused(other)),
        }
    }

    /// Writes a register, some time before what is asked later. Never waits.
    pub(super) fn post(&self, region: u32, offset: u64, data: &[u8]) {
        let mut wire = self.lock();
        if wire.lost.is_none() {
            wire.client.post(region, offset, data);
            let _ = wire.send(&self.shared);
        }
    }

    /// Lets the other process reach a region, by its descriptor, or by message if it has none. Says
    /// where it finds it.
    pub(super) fn show(&self, region: RegionId) -> Replied<u64> {
        let _turn = self.turn();
        let mut wire = self.lock();
        if let Some(shown) = wire.shown.iter().find(|shown| shown.region == region) {
            return Ok(shown.iova);
        }
        if let Some(why) = &wire.lost {
            return Err(why.clone());
        }
        let len_bytes = wire.regions.len_bytes(region);
        let iova = wire.space.allocate(len_bytes).filter(|_| len_bytes > 0);
        let iova = iova.ok_or("there is no such region, or no row of addresses for it")?;
        let shown = Shown { iova, len_bytes, region };
        let file = wire.regions.descriptor(region).map(Arc::new);
        let (is_readable, is_writable) = (true, true);
        let map = DmaMap { iova, len_bytes, file_offset: 0, is_readable, is_writable };
        let id = wire.client.map(map, file);
        // What was asked and is not answered may be there.
        wire.shown.push(shown);
        drop(wire);
        let done = self.done(id);
        if done.is_err() && self.lost().is_none() {
            self.lock().forget(shown);
        }
        done.map(|()| iova)
    }

    /// Takes a region away: once this has returned well, the other process does not reach it.
    pub(super) fn hide(&self, region: RegionId) -> Replied<()> {
        // What it does not know needs no turn, for which one may have to wait.
        if self.lock().known(region).is_none() {
            return Ok(());
        }
        let _turn = self.turn();
        let mut wire = self.lock();
        let Some(shown) = wire.known(region) else { return Ok(()) };
        if let Some(why) = wire.lost.clone() {
            drop(wire);
            return if self.has_ended() { Ok(()) } else { Err(why) };
        }
        let id = wire.client.unmap(shown.iova, shown.len_bytes);
        drop(wire);
        let done = self.done(id);
        if done.is_err() && !self.has_ended() {
            return done;
        }
        self.lock().forget(shown);
        Ok(())
    }

    /// Has `vector` signalled by `descriptor`.
    pub(super) fn set_vector(&self, vector: u16, descriptor: BorrowedFd<'_>) -> Replied<()> {
        let file = descriptor.try_clone_to_owned().map_err(|error| error.to_string())?;
        let _turn = self.turn();
        let id = self.lock().client.set_irqs(IrqSet {
            index: irq_index::MSIX,
            start: vector.into(),
            count: 1,
            action: IrqAction::Trigger,
            data: IrqData::Files(vec![Arc::new(file)]),
        });
        self.done(id)
    }

    fn lock(&self) -> MutexGuard<'_, Wire> {
        self.shared.wire.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Questions are asked one after the other.
    fn turn(&self) -> MutexGuard<'_, ()> {
        self.shared.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn done(&self, id: u16) -> Replied<()> {
        match self.wait(|answer| is_answer_to(answer, id))? {
            Answer::Done { .. } => Ok(()),
            other => Err(refused(other)),
        }
    }

    /// Waits for an answer, of whoever has the turn.
    fn wait(&self, is_it: impl Fn(&Answer<Arc<OwnedFd>>) -> bool) -> Replied<Answer<Arc<OwnedFd>>> {
        let end = self.shared.clock.now().after(self.shared.patience);
        let mut ready = Vec::new();
        loop {
            let mut wire = self.lock();
            wire.carry(&self.shared)?;
            if let Some(at) = wire.answers.iter().position(&is_it) {
                return Ok(wire.answers.swap_remove(at));
            }
            let now = self.shared.clock.now();
            if now >= end {
                let why = format!("no answer within {}", self.shared.patience);
                wire.lose(&self.shared, &why);
                return Err(why);
            }
            drop(wire);
            let waited = self.shared.watch.wait(Some(end.since(now)), &mut ready);
            waited.map_err(|error| error.to_string())?;
        }
    }

    /// Agrees on a version, and asks what the device is like.
    fn explore(&self, regions: &Regions) -> Replied<Offer> {
        let turn = self.turn();
        let ends = |answer: &Answer<_>| matches!(answer, Answer::Refused { .. });
        let wants = |answer: &Answer<_>| matches!(answer, Answer::Version(_)) || ends(answer);
        match self.wait(wants)? {
            Answer::Version(_) => {}
            Answer::Refused { error: Errno::BUSY, .. } => {
                return Err("another client has it, expected none".to_owned());
            }
            other => return Err(refused(other)),
        }
        self.lock().client.device();
        let wants = |answer: &Answer<_>| matches!(answer, Answer::Device { .. }) || ends(answer);
        let Answer::Device { regions: count, irqs, can_reset } = self.wait(wants)? else {
            return Err("it does not say what it is".to_owned());
        };
        if count <= region_index::CONFIGURATION || irqs <= irq_index::MSIX {
            return Err(format!("{count} regions and {irqs} interrupts, expected a PCI device"));
        }
        self.lock().client.region(region_index::BAR0);
        let wants = |answer: &Answer<_>| matches!(answer, Answer::Region { .. }) || ends(answer);
        let Answer::Region { shape: bar, file, .. } = self.wait(wants)? else {
            return Err("it does not say what BAR 0 is like".to_owned());
        };
        self.lock().client.irqs(irq_index::MSIX);
        let wants = |answer: &Answer<_>| matches!(answer, Answer::Irqs { .. }) || ends(answer);
        let Answer::Irqs { shape: msix, .. } = self.wait(wants)? else {
            return Err("it does not say what its interrupts are like".to_owned());
        };
        if can_reset {
            let id = self.lock().client.reset();
            self.done(id)?;
        }
        drop(turn);
        let table_offset = self.check_function(&bar)?;
        let doorbells = doorbells_of(regions, &bar, file);
        Ok(Offer { doorbells, vectors: msix.count, table_offset })
    }

    /// Looks whether it is an NVMe controller, and lets it reach memory. Where its vector table is.
    fn check_function(&self, bar: &RegionShape) -> Replied<u32> {
        let space = self.read(region_index::CONFIGURATION, 0, 256)?;
        if space[9..12] != NVM_EXPRESS {
            let [interface, subclass, class] = [space[9], space[10], space[11]];
            return Err(format!(
                "class {class:02x}{subclass:02x}{interface:02x}, expected 010802, an NVMe controller"
            ));
        }
        let command = u16::from_le_bytes([space[COMMAND], space[COMMAND + 1]]) | COMMAND_SET;
        self.post(region_index::CONFIGURATION, COMMAND as u64, &command.to_le_bytes());
        let mut at = usize::from(space[0x34]);
        for _ in 0..48 {
            let Some(capability) = space.get(at..at + 12).filter(|_| at >= 0x40) else { break };
            if capability[0] == MSIX {
                let [a, b, c, d] = [4, 5, 6, 7].map(|byte| capability[byte]);
                let place = u32::from_le_bytes([a, b, c, d]);
                // In another BAR it is of no use here.
                let is_inside = place & 7 == 0 && u64::from(place) < bar.size;
                return Ok(if is_inside { place } else { 0 });
            }
            at = usize::from(capability[1]);
        }
        Ok(0)
    }
}

impl Wire {
    /// What the other side knows of a region.
    fn known(&self, region: RegionId) -> Option<Shown> {
        let shown = self.shown.iter().find(|shown| shown.region == region);
        shown.filter(|_| !self.has_ended).copied()
    }

    fn lose(&mut self, shared: &Shared, why: &str) {
        if self.lost.is_none() {
            self.lost = Some(why.to_owned());
            // One that has gone already need not be told.
            let _ = shared.connection.finish();
            self.wait_for(shared, END);
        }
    }

    fn carry(&mut self, shared: &Shared) -> Replied<()> {
        if self.lost.is_none() {
            self.send(shared)?;
        }
        for _ in 0..READS_MAX {
            if self.lost.is_some() {
                break;
            }
            let wanted = self.client.wanted().min(self.buffer.len());
            if wanted == 0 {
                return Ok(());
            }
            let (mut files, most) = (Vec::new(), Capabilities::OURS.files_max as usize);
            let buffer = &mut self.buffer[..wanted];
            match shared.connection.receive_files(buffer, &mut files, most) {
                Ok(Received::Nothing) => return Ok(()),
                Ok(Received::Bytes(count)) => {
                    let files = files.into_iter().map(Arc::new);
                    match self.client.receive(&self.buffer[..count], files) {
                        Ok(None) => {}
                        Ok(Some(answer)) => self.take(shared, answer)?,
                        Err(violation) => self.lose(shared, &violation.to_string()),
                    }
                }
                Ok(Received::End) => self.end(shared),
                Err(error) => self.lose(shared, &error.to_string()),
            }
        }
        match self.lost.clone() {
            None => Ok(()),
            Some(why) => {
                self.await_end(shared);
                Err(why)
            }
        }
    }

    /// Reads on to the end, so that the other side is not kept from it.
    fn await_end(&mut self, shared: &Shared) {
        for _ in 0..READS_MAX {
            if self.has_ended {
                return;
            }
            match shared.connection.receive(&mut self.buffer) {
                Ok(Received::Bytes(_)) => {}
                Ok(Received::Nothing) | Err(_) => return,
                Ok(Received::End) => self.end(shared),
            }
        }
    }

    fn end(&mut self, shared: &Shared) {
        self.lose(shared, "the process that served it has gone");
        self.has_ended = true;
        // It would say so for ever.
        let _ = shared.watch.remove(&shared.connection);
    }

    fn send(&mut self, shared: &Shared) -> Replied<()> {
        while let Some(outgoing) = self.client.outgoing() {
            if let Some(why) = &self.lost {
                return Err(why.clone());
            }
            let files: Vec<BorrowedFd<'_>> =
                outgoing.files.iter().map(|file| file.as_fd()).collect();
            match shared.connection.send_files(outgoing.bytes, &files) {
                Ok(0) => break,
                Ok(sent) => self.client.sent(sent),
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                    self.lose(shared, "the process that served it has gone");
                }
                Err(error) => self.lose(shared, &error.to_string()),
            }
        }
        if self.lost.is_none() {
            let writable = self.client.outgoing().is_some();
            let readable = self.client.wanted() > 0;
            self.wait_for(shared, Interest { readable, writable });
        }
        Ok(())
    }

    fn wait_for(&mut self, shared: &Shared, interest: Interest) {
        if self.interest != interest {
            self.interest = interest;
            // What is in the set can be changed: no memory is needed for it.
            let _ = shared.watch.change(&shared.connection, 0, interest);
        }
    }

    /// Keeps an answer for whoever waits for it, and serves what is asked of our memory.
    fn take(&mut self, shared: &Shared, answer: Answer<Arc<OwnedFd>>) -> Replied<()> {
        match answer {
            Answer::DmaRead { call, iova, len_bytes } => {
                let mut data = vec![0; len_bytes as usize];
                let segment = self.segment(iova, len_bytes);
                match segment.and_then(|segment| self.regions.load(segment, &mut data).ok()) {
                    Some(()) => self.client.data(call, &data),
                    None => self.client.refuse(call, Errno::FAULT),
                }
            }
            Answer::DmaWrite { call, iova, data } => {
                let len_bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
                let segment = self.segment(iova, len_bytes);
                match segment.and_then(|segment| self.regions.store(segment, &data).ok()) {
                    Some(()) => self.client.written(call),
                    None => self.client.refuse(call, Errno::FAULT),
                }
            }
            other => {
                self.answers.push(other);
                return Ok(());
            }
        }
        self.send(shared)
    }

    fn forget(&mut self, shown: Shown) {
        self.shown.retain(|other| *other != shown);
        self.space.release(shown.iova, shown.len_bytes);
    }

    fn segment(&self, iova: u64, len_bytes: u32) -> Option<Segment> {
        let around = |shown: &&Shown| {
            let skip = iova.wrapping_sub(shown.iova);
            skip < shown.len_bytes && u64::from(len_bytes) <= shown.len_bytes - skip
        };
        let shown = self.shown.iter().find(around)?;
        Some(Segment { region: shown.region, offset: iova - shown.iova, len_bytes })
    }
}

fn is_answer_to<F>(answer: &Answer<F>, wanted: u16) -> bool {
    match answer {
        Answer::Done { id } | Answer::Refused { id, .. } | Answer::Data { id, .. } => *id == wanted,
        _ => false,
    }
}

fn refused<F>(answer: Answer<F>) -> String {
    match answer {
        Answer::Refused { command, error, .. } => format!("{command} was refused: {error}"),
        _ => "an answer to something else".to_owned(),
    }
}

/// Maps the part of BAR 0 with doorbells, if it is offered.
fn doorbells_of(
    regions: &Regions,
    bar: &RegionShape,
    file: Option<Arc<OwnedFd>>,
) -> Option<(Arc<Adopted>, Area)> {
    let area = bar.areas.iter().find(|area| area.offset <= DOORBELLS && area.size > 0);
    let (area, file) = area.copied().zip(file)?;
    let offset = bar.file_offset.checked_add(area.offset);
    let part = FilePart { offset: offset.unwrap_or(u64::MAX), len_bytes: area.size };
    // What cannot be mapped is written by message.
    let adopted = regions.adopt(file.as_fd(), part).ok()?;
    Some((Arc::new(adopted), area))
}
