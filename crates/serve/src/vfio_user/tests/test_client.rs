//! A device on its own reactor, and a client that simulates a virtual machine.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use tenmil_base::{BlockDevice, Memory, Segment, Span};
use tenmil_dma::{Region, RegionTable};
use tenmil_drivers::RamDevice;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tenmil_linux::{Clock, EventFdVectors};
use tenmil_reactor::{PollMode, Reactors};
use tenmil_vfio_user::server::DmaMap;
use tenmil_vfio_user::{
    Client, ClientEvent, IrqAction, IrqSelection, IrqSet, irq_index, region_index,
};

use crate::endpoint_event::EndpointEvent;
use crate::test_reactors::TIME_LIMIT;
use crate::test_reactors::{await_event, reactors_on};
use crate::vfio_user::{ControllerOptions, Server, ServerConfig};

/// Server served by a light thread.
pub(super) struct TestServer {
    pub(super) regions: RegionTable,
    pub(super) clock: Clock,
    pub(super) server: Server,
    reactors: Option<Reactors>,
    pub(super) directory: tempfile::TempDir,
}

/// Client with 1 MiB of memory at [`IOVA`].
pub(super) struct TestClient {
    pub(super) connection: LocalConnection,
    pub(super) client: Client<Arc<OwnedFd>>,
    pub(super) replies: Vec<ClientEvent<Arc<OwnedFd>>>,
    pub(super) regions: RegionTable,
    pub(super) memory: Region,
    clock: Clock,
    /// Number of DMA accesses by message.
    pub(super) asked: usize,
    /// Offset from [`IOVA`] to the actual start of the memory.
    pub(super) shift: u64,
    tails: [u32; 3],
    heads: [u32; 3],
}

/// Start of the machine's memory in the address space of the device.
pub(super) const IOVA: u64 = 0x10_0000;
pub(super) const MEMORY_BYTES: u64 = 1 << 20;
pub(super) const BLOCKS: u64 = 256;

/// Offsets in the memory of the machine.
pub(super) const ADMIN: [u64; 2] = [0, 0x1000];
pub(super) const QUEUE: [u64; 2] = [0x2000, 0x3000];
pub(super) const DATA: u64 = 0x10000;
/// Entries of every queue.
pub(super) const ENTRIES: u32 = 16;

impl TestServer {
    pub(super) fn new(poll: PollMode) -> Self {
        Self::with_device(poll, |regions| Arc::new(RamDevice::new(regions, 512, BLOCKS).unwrap()))
    }

    /// Same, over another device.
    pub(super) fn with_device(
        poll: PollMode,
        medium: impl FnOnce(&RegionTable) -> Arc<dyn BlockDevice>,
    ) -> Self {
        let (regions, clock) = (RegionTable::new(64), Clock::start());
        let reactors = reactors_on(1, poll, &clock);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("device");
        let listen_socket = StreamListener::open(&ListenAddress::Path(path)).unwrap();
        let medium = medium(&regions);
        let maps_doorbells = poll == PollMode::Always;
        let server = Server::start(ServerConfig {
            listen_socket,
            media: vec![medium],
            options: ControllerOptions {
                maps_doorbells,
                queues: 4,
                ..ControllerOptions::default()
            },
            regions: regions.clone(),
            reactors: Arc::clone(reactors.registry()),
            clock,
        });
        let server = server.unwrap();
        Self { regions, clock, server, reactors: Some(reactors), directory }
    }

    pub(super) fn socket_path(&self) -> std::path::PathBuf {
        self.directory.path().join("device")
    }

    /// Client with a negotiated connection.
    pub(super) fn connect_client(&self) -> TestClient {
        let mut machine = TestClient::connect(&self.socket_path(), self.clock);
        machine.await_reply(|reply| matches!(reply, ClientEvent::Version(_)));
        machine
    }

    pub(super) fn await_event(&self, matches: impl FnMut(&EndpointEvent) -> bool) -> EndpointEvent {
        await_event(&self.clock, || self.server.next_event(), matches)
    }

    /// Waits until all memory of all clients is unmapped.
    pub(super) fn await_region_count(&self, count: usize) {
        let end = self.clock.now().after(TIME_LIMIT);
        while self.regions.region_count() != count {
            assert!(self.clock.now() < end, "{} regions are left", self.regions.region_count());
            tenmil_linux::named_thread::sleep(Span::from_us(100));
        }
    }

    pub(super) fn stop(&mut self) {
        if let Some(reactors) = self.reactors.take() {
            reactors.stop();
        }
    }
}

impl TestClient {
    pub(super) fn connect(path: &Path, clock: Clock) -> Self {
        let connection = LocalConnection::connect(path, TIME_LIMIT).unwrap();
        let regions = RegionTable::shared(4);
        let memory = regions.allocate_region(1 << 20).unwrap();
        let (client, replies) = (Client::new(), Vec::new());
        let (tails, heads) = ([0; 3], [0; 3]);
        let (asked, shift) = (0, 0);
        Self { connection, client, replies, regions, memory, clock, asked, shift, tails, heads }
    }

    /// Processes messages until a matching one arrives.
    pub(super) fn await_reply(
        &mut self,
        matches: impl Fn(&ClientEvent<Arc<OwnedFd>>) -> bool,
    ) -> ClientEvent<Arc<OwnedFd>> {
        let end = self.clock.now().after(TIME_LIMIT);
        loop {
            let is_there = self.process_messages();
            if let Some(at) = self.replies.iter().position(&matches) {
                return self.replies.swap_remove(at);
            }
            assert!(is_there, "the server has gone");
            assert!(self.clock.now() < end, "no answer");
            self.connection.wait_to_receive(Span::from_ms(100)).unwrap();
        }
    }

    /// Processes received messages; false once the server has closed.
    pub(super) fn process_messages(&mut self) -> bool {
        loop {
            while let Some(outgoing) = self.client.next_outgoing() {
                let files: Vec<BorrowedFd<'_>> =
                    outgoing.files.iter().map(|file| file.as_fd()).collect();
                match self.connection.send_files(outgoing.bytes, &files) {
                    Ok(sent) => self.client.record_sent(sent),
                    Err(_) => return false,
                }
            }
            let mut bytes = vec![0; self.client.receive_len()];
            let mut files = Vec::new();
            match self.connection.receive_files(&mut bytes, &mut files, 16).unwrap() {
                RecvResult::WouldBlock => return true,
                RecvResult::Eof => return false,
                RecvResult::Bytes(count) => {
                    let files = files.into_iter().map(Arc::new);
                    if let Some(reply) =
                        self.client.handle_received(&bytes[..count], files).unwrap()
                    {
                        self.handle_server_message(reply);
                    }
                }
            }
        }
    }

    fn handle_server_message(&mut self, reply: ClientEvent<Arc<OwnedFd>>) {
        match reply {
            ClientEvent::DmaRead { call, iova, len_bytes } => {
                self.asked += 1;
                let data = self.load_memory(iova - IOVA - self.shift, len_bytes);
                self.client.reply_dma_read(call, &data);
            }
            ClientEvent::DmaWrite { call, iova, data } => {
                self.asked += 1;
                self.store_memory(iova - IOVA - self.shift, &data);
                self.client.reply_dma_write(call);
            }
            other => self.replies.push(other),
        }
    }

    pub(super) fn await_reply_to(&mut self, id: u16) -> ClientEvent<Arc<OwnedFd>> {
        self.await_reply(|reply| match reply {
            ClientEvent::Done { id: found }
            | ClientEvent::Refused { id: found, .. }
            | ClientEvent::Data { id: found, .. } => *found == id,
            _ => false,
        })
    }

    /// Error number of a reply; 0 for success.
    pub(super) fn await_errno(&mut self, id: u16) -> u32 {
        match self.await_reply_to(id) {
            ClientEvent::Refused { error, .. } => error.0,
            _ => 0,
        }
    }

    pub(super) fn map_own_memory(&mut self, is_shared: bool) {
        let file = self.regions.descriptor(self.memory.id()).filter(|_| is_shared);
        let id = self.client.request_dma_map(whole_memory_map(), file.map(Arc::new));
        assert_eq!(self.await_errno(id), 0);
    }

    /// Maps more than the file contains.
    pub(super) fn map_more_than_file(&mut self) {
        let file = self.regions.descriptor(self.memory.id());
        let map = DmaMap { iova: IOVA << 8, file_offset: MEMORY_BYTES, ..whole_memory_map() };
        let id = self.client.request_dma_map(map, file.map(Arc::new));
        assert_ne!(self.await_errno(id), 0);
    }

    pub(super) fn memory_segment(&self, at: u64, len_bytes: u32) -> Segment {
        Segment { region: self.memory.id(), offset: at, len_bytes }
    }

    pub(super) fn load_memory(&self, at: u64, len_bytes: u32) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes as usize];
        self.regions.load(self.memory_segment(at, len_bytes), &mut bytes).unwrap();
        bytes
    }

    pub(super) fn store_memory(&self, at: u64, bytes: &[u8]) {
        let len_bytes = u32::try_from(bytes.len()).unwrap();
        self.regions.store(self.memory_segment(at, len_bytes), bytes).unwrap();
    }

    pub(super) fn read_region(&mut self, at: u64, len_bytes: u32) -> u64 {
        let id = self.client.request_region_read(region_index::BAR0, at, len_bytes);
        let ClientEvent::Data { data, .. } = self.await_reply_to(id) else { panic!("refused") };
        data.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    pub(super) fn write_region(&mut self, at: u64, bytes: &[u8]) {
        let id = self.client.request_region_write(region_index::BAR0, at, bytes);
        assert_eq!(self.await_errno(id), 0);
    }

    /// Enables the controller with its admin queues, like a driver.
    pub(super) fn enable_controller(&mut self) {
        let last = ENTRIES - 1;
        self.write_region(0x24, &(last << 16 | last).to_le_bytes());
        self.write_region(0x28, &(IOVA + ADMIN[0]).to_le_bytes());
        self.write_region(0x30, &(IOVA + ADMIN[1]).to_le_bytes());
        self.write_region(0x14, &(6_u32 << 16 | 4 << 20 | 1).to_le_bytes());
        self.await_csts_ready(1);
    }

    pub(super) fn await_csts_ready(&mut self, ready: u64) {
        let end = self.clock.now().after(TIME_LIMIT);
        while self.read_region(0x1c, 4) & 1 != ready {
            assert!(self.clock.now() < end, "CSTS.RDY stays");
        }
    }

    /// Clears the queues after a reset, for the ones created next.
    pub(super) fn clear_queues(&mut self) {
        (self.tails, self.heads) = ([0; 3], [0; 3]);
        self.store_memory(0, &[0; 0x4000]);
    }

    /// Submits a command and rings the doorbell.
    pub(super) fn submit_command(&mut self, queue: u16, command: [u32; 16]) {
        let next = self.queue_command_without_doorbell(queue, command);
        self.ring_doorbell(2 * u64::from(queue), next);
    }

    /// Submits a command without ringing the doorbell; returns the new tail.
    pub(super) fn queue_command_without_doorbell(&mut self, queue: u16, command: [u32; 16]) -> u32 {
        let base = if queue == 0 { ADMIN[0] } else { QUEUE[0] };
        let tail = &mut self.tails[usize::from(queue)];
        let (at, next) = (base + u64::from(*tail) * 64, (*tail + 1) % ENTRIES);
        *tail = next;
        let bytes: Vec<u8> = command.iter().flat_map(|dword| dword.to_le_bytes()).collect();
        self.store_memory(at, &bytes);
        next
    }

    pub(super) fn ring_doorbell(&mut self, index: u64, value: u32) {
        self.client.write_region_without_reply(
            region_index::BAR0,
            0x1000 + index * 32,
            &value.to_le_bytes(),
        );
        self.process_messages();
    }

    /// Waits for the next completion of a queue; returns its status.
    pub(super) fn await_completion(&mut self, queue: u16) -> u16 {
        let head = self.heads[usize::from(queue)];
        let end = self.clock.now().after(TIME_LIMIT);
        loop {
            if let Some(status) = self.next_completion(queue) {
                self.heads[usize::from(queue)] = head + 1;
                self.ring_doorbell(2 * u64::from(queue) + 1, (head + 1) % ENTRIES);
                return status;
            }
            assert!(self.clock.now() < end, "no completion");
            assert!(self.process_messages(), "the server has gone");
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    /// Status of the next completion of a queue, if there is one.
    pub(super) fn next_completion(&self, queue: u16) -> Option<u16> {
        let base = if queue == 0 { ADMIN[1] } else { QUEUE[1] };
        let head = self.heads[usize::from(queue)];
        let bytes = self.load_memory(base + u64::from(head % ENTRIES) * 16 + 14, 2);
        let status = u16::from_le_bytes([bytes[0], bytes[1]]);
        let phase = u16::from((head / ENTRIES).is_multiple_of(2));
        (status & 1 == phase).then_some(status >> 1)
    }

    pub(super) fn execute_admin(&mut self, command: [u32; 16]) -> u16 {
        self.submit_command(0, command);
        self.await_completion(0)
    }

    /// Creates an I/O queue pair with vector 1.
    pub(super) fn create_io_queue(&mut self) {
        let size = (ENTRIES - 1) << 16 | 1;
        let place = |at: u64| u32::try_from(IOVA + at).unwrap();
        let completion =
            admin_command(&[(0, 0x05), (6, place(QUEUE[1])), (10, size), (11, 1 << 16 | 3)]);
        assert_eq!(self.execute_admin(completion), 0);
        let submission =
            admin_command(&[(0, 0x01), (6, place(QUEUE[0])), (10, size), (11, 1 << 16 | 1)]);
        assert_eq!(self.execute_admin(submission), 0);
        (self.tails[1], self.heads[1]) = (0, 0);
    }

    /// Reads (2) or writes (1) `blocks` blocks at `lba`, with data at [`DATA`]; returns the status.
    pub(super) fn execute_read_or_write(&mut self, opcode: u32, lba: u32, blocks: u32) -> u16 {
        let place = u32::try_from(IOVA + DATA).unwrap();
        let second = if blocks > 8 { place + 0x1000 } else { 0 };
        self.submit_command(
            1,
            admin_command(&[
                (0, opcode),
                (1, 1),
                (6, place),
                (8, second),
                (10, lba),
                (12, blocks - 1),
            ]),
        );
        self.await_completion(1)
    }

    /// Sets the eventfds of the vectors.
    pub(super) fn set_vector_eventfds(&mut self, vectors: &EventFdVectors) -> u16 {
        let count = u16::try_from(vectors.vector_count()).unwrap();
        let file = |vector| vectors.descriptor(vector).unwrap().try_clone_to_owned().unwrap();
        let files = (0..count).map(|vector| Arc::new(file(vector))).collect();
        self.client.request_set_irqs(IrqSet {
            index: irq_index::MSIX,
            start: 0,
            count: count.into(),
            action: IrqAction::Trigger,
            data: IrqSelection::Files(files),
        })
    }
}

/// Mapping of all memory of a machine.
pub(super) fn whole_memory_map() -> DmaMap {
    let (is_readable, is_writable) = (true, true);
    DmaMap { iova: IOVA, len_bytes: MEMORY_BYTES, file_offset: 0, is_readable, is_writable }
}

/// Command with these dwords.
pub(super) fn admin_command(dwords: &[(usize, u32)]) -> [u32; 16] {
    let mut command = [0; 16];
    dwords.iter().for_each(|(at, dword)| command[*at] = *dword);
    command
}
