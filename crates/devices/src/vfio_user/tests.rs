//! A vfio-user connection to a mock server.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use tenmil_base::{Error, Instant, Span};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tenmil_linux::{Clock, NamedThread, StopFlag};
use tenmil_vfio_user::server::{PendingReply, Request};
use tenmil_vfio_user::{
    DeviceInfo, IrqInfo, RegionInfo, Server, SparseMmapArea, irq_index, region_index,
};

use super::VfioUserUri;
use super::connection::{ConnectionHandle, ServerFeatures};
use crate::attached_controller::AttachOptions;

type SharedFd = Arc<OwnedFd>;

const TIME_LIMIT: Span = Span::from_secs(20);
const DOORBELL: u64 = 0x1000;
/// Initial value of the Command register: parity errors and SERR#.
const COMMAND: u16 = 0x0140;

/// Server side.
struct MockServer {
    connection: LocalConnection,
    server: Server<SharedFd>,
}

impl MockServer {
    /// Next request. None if the connection has ended.
    fn next(&mut self) -> Option<Request<SharedFd>> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            if let Some(request) = self.server.next_request().unwrap() {
                return Some(request);
            }
            self.send();
            let wanted = self.server.receive_len();
            let mut files = Vec::new();
            match self.connection.receive_files(&mut buffer[..wanted], &mut files, 16).unwrap() {
                RecvResult::Eof => return None,
                RecvResult::WouldBlock => {
                    assert!(self.connection.wait_to_receive(TIME_LIMIT).unwrap())
                }
                RecvResult::Bytes(count) => {
                    let files = files.into_iter().map(Arc::new);
                    self.server.handle_received(&buffer[..count], files).unwrap();
                }
            }
        }
    }

    fn send(&mut self) {
        while let Some(outgoing) = self.server.next_outgoing() {
            assert!(self.connection.wait_to_send(TIME_LIMIT).unwrap());
            let files: Vec<BorrowedFd<'_>> =
                outgoing.files.iter().map(|file| file.as_fd()).collect();
            let sent = self.connection.send_files(outgoing.bytes, &files).unwrap();
            self.server.record_sent(sent);
        }
    }

    fn reply_success(&mut self, call: PendingReply) {
        self.server.reply_success(call);
        self.send();
    }

    /// Serves requests until one writes to `region`. Returns its offset and data. None if the
    /// connection has ended before.
    fn serve_until_written(&mut self, region: u32) -> Option<(u64, Vec<u8>)> {
        while let Some(request) = self.next() {
            match request {
                Request::Write { call, region: found, offset, data } => {
                    self.reply_success(call);
                    if found == region {
                        return Some((offset, data));
                    }
                }
                Request::Read { call, len_bytes, .. } => {
                    let mut data = vec![0; len_bytes as usize];
                    if len_bytes == 256 {
                        data[9..12].copy_from_slice(&[2, 8, 1]);
                        data[4..6].copy_from_slice(&COMMAND.to_le_bytes());
                    }
                    self.server.reply_read(call, &data);
                    self.send();
                }
                Request::Map { call, .. }
                | Request::Unmap { call, .. }
                | Request::SetIrqs { call, .. }
                | Request::Reset { call } => self.reply_success(call),
                other => panic!("{other:?}"),
            }
        }
        None
    }
}

/// A device with a part of BAR 0 that can be mapped.
fn device(area: Option<(SparseMmapArea, SharedFd)>) -> DeviceInfo<SharedFd> {
    let plain =
        |size| RegionInfo { size, is_readable: true, is_writable: true, ..RegionInfo::default() };
    let mut regions = vec![(RegionInfo::default(), None); region_index::COUNT as usize];
    let (areas, file) = area.map_or((Vec::new(), None), |(area, file)| (vec![area], Some(file)));
    regions[region_index::BAR0 as usize] = (RegionInfo { areas, ..plain(0x4000) }, file);
    regions[region_index::CONFIGURATION as usize] = (plain(256), None);
    let mut irqs = vec![IrqInfo::default(); irq_index::COUNT as usize];
    irqs[irq_index::MSIX as usize] = IrqInfo { count: 3, ..IrqInfo::default() };
    DeviceInfo { regions, irqs }
}

/// A connection that has read the properties of the device.
fn connect_to_server(
    time_limit: Span,
    device: DeviceInfo<SharedFd>,
    regions: &RegionTable,
) -> (ConnectionHandle, ServerFeatures, MockServer) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("device");
    let listener = StreamListener::open(&ListenAddress::Path(path.clone())).unwrap();
    let serve = move |_: &StopFlag| {
        let socket = loop {
            match listener.accept().unwrap() {
                Some(socket) => break socket,
                None => tenmil_linux::named_thread::yield_cpu(),
            }
        };
        let mut mock_server =
            MockServer { connection: LocalConnection::from(socket), server: Server::new(device) };
        // The last request of the connection setup.
        let written = mock_server.serve_until_written(region_index::CONFIGURATION);
        // The initial value with Memory Space, Bus Master, and Interrupt Disable (PCI 3.0 §6.2.2).
        assert_eq!(written, Some((4, 0x0546_u16.to_le_bytes().to_vec())));
        mock_server
    };
    let thread = NamedThread::spawn("peer", None, serve).unwrap();
    let (shadow_doorbells, queues_in_cmb) = (true, false);
    let wanted = AttachOptions {
        namespace: 1,
        depth: 1,
        queues: 1,
        shadow_doorbells,
        queues_in_cmb,
        time_limit,
    };
    let name = VfioUserUri { path, wanted };
    let Ok((link, offer)) = ConnectionHandle::connect(&name, regions, Clock::start()) else {
        panic!()
    };
    (link, offer, thread.join())
}

fn connect_without_mapping(regions: &RegionTable) -> (ConnectionHandle, MockServer) {
    let (link, _, mock_server) = connect_to_server(TIME_LIMIT, device(None), regions);
    (link, mock_server)
}

/// Thread that reads a register.
fn spawn_register_read(link: &ConnectionHandle) -> NamedThread<Result<Vec<u8>, Error>> {
    let link = link.clone();
    NamedThread::spawn("asks", None, move |_| link.read(region_index::BAR0, 0, 4)).unwrap()
}

/// A region that is mapped for the server.
fn map_region_for_server(
    link: &ConnectionHandle,
    mock_server: &mut MockServer,
    regions: &RegionTable,
) -> Region {
    let region = regions.allocate_shared(4096).unwrap();
    let (id, link) = (region.id(), link.clone());
    let shows = NamedThread::spawn("shows", None, move |_| link.map_region(id)).unwrap();
    let Some(Request::Map { call, map, file }) = mock_server.next() else { panic!() };
    assert_eq!((map.len_bytes, file.is_some()), (4096, true));
    mock_server.reply_success(call);
    assert_eq!(shows.join(), Ok(map.iova));
    region
}

/// A server that was stopped may continue later with the memory it was given.
#[test]
fn memory_is_released_only_once_the_server_has_closed() {
    let regions = RegionTable::new(4);
    let (link, mut mock_server) = connect_without_mapping(&regions);
    let region = map_region_for_server(&link, &mut mock_server, &regions);
    link.mark_lost("a test");
    assert!(!link.has_server_closed());
    assert_eq!(link.unmap_region(region.id()), Err(Error::environment("a test")));
    assert!(mock_server.next().is_none(), "it is reported");
    assert!(!link.has_server_closed());
    drop(mock_server);
    assert!(link.has_server_closed());
    assert_eq!(link.unmap_region(region.id()), Ok(()));
}

#[test]
fn unmapped_region_is_unmapped_at_the_server_and_frees_its_iova() {
    let regions = RegionTable::new(4);
    let (link, mut mock_server) = connect_without_mapping(&regions);
    let region = map_region_for_server(&link, &mut mock_server, &regions);
    let (id, hiding) = (region.id(), link.clone());
    let hides = NamedThread::spawn("hides", None, move |_| hiding.unmap_region(id)).unwrap();
    let Some(Request::Unmap { call, iova, len_bytes: 4096 }) = mock_server.next() else { panic!() };
    mock_server.reply_success(call);
    assert_eq!(hides.join(), Ok(()));
    let other = regions.allocate_shared(4096).unwrap();
    let (id, showing) = (other.id(), link.clone());
    let shows = NamedThread::spawn("shows", None, move |_| showing.map_region(id)).unwrap();
    let Some(Request::Map { call, .. }) = mock_server.next() else { panic!() };
    mock_server.reply_success(call);
    assert_eq!(shows.join(), Ok(iova));
}

#[test]
fn never_mapped_region_is_unmapped_while_a_request_is_pending() {
    let regions = RegionTable::new(4);
    let (link, mut mock_server) = connect_without_mapping(&regions);
    let reader = spawn_register_read(&link);
    let Some(Request::Read { call, .. }) = mock_server.next() else { panic!() };
    let region = regions.allocate_shared(4096).unwrap();
    assert_eq!(link.unmap_region(region.id()), Ok(()));
    mock_server.server.reply_read(call, &[7; 4]);
    mock_server.send();
    assert_eq!(reader.join(), Ok(vec![7; 4]));
}

#[test]
fn doorbell_write_does_not_wait_for_a_pending_reply() {
    let regions = RegionTable::new(4);
    let (link, mut mock_server) = connect_without_mapping(&regions);
    let reader = spawn_register_read(&link);
    let Some(Request::Read { call, .. }) = mock_server.next() else { panic!() };
    link.write_device_region_no_reply(region_index::BAR0, DOORBELL, &[1; 4]);
    assert!(mock_server.connection.wait_to_receive(Span::default()).unwrap());
    mock_server.server.reply_read(call, &[7; 4]);
    mock_server.send();
    assert_eq!(reader.join(), Ok(vec![7; 4]));
}

/// Posts more doorbell writes than any socket buffers.
fn post_doorbells_until_socket_is_full(link: &ConnectionHandle) {
    (0..5000)
        .for_each(|_| link.write_device_region_no_reply(region_index::BAR0, DOORBELL, &[1; 4]));
}

#[test]
fn request_behind_unsent_bytes_is_sent_once_the_socket_is_writable() {
    let regions = RegionTable::new(4);
    let (link, mut mock_server) = connect_without_mapping(&regions);
    post_doorbells_until_socket_is_full(&link);
    let reader = spawn_register_read(&link);
    let serve = move |_: &StopFlag| {
        while let Some(request) = mock_server.next() {
            match request {
                Request::Write { call, .. } => mock_server.reply_success(call),
                Request::Read { call, .. } => {
                    mock_server.server.reply_read(call, &[7; 4]);
                    mock_server.send();
                    return mock_server;
                }
                other => panic!("{other:?}"),
            }
        }
        panic!("the link was lost");
    };
    let mock_server = NamedThread::spawn("peer", None, serve).unwrap();
    assert_eq!(reader.join(), Ok(vec![7; 4]));
    mock_server.join();
}

#[test]
fn connection_thread_is_woken_when_the_socket_is_writable() {
    let regions = RegionTable::new(4);
    let (link, mut mock_server) = connect_without_mapping(&regions);
    post_doorbells_until_socket_is_full(&link);
    let serve = move |_: &StopFlag| {
        for _ in 0..5000 {
            let Some(Request::Write { call, .. }) = mock_server.next() else { panic!() };
            mock_server.reply_success(call);
        }
    };
    let mock_server = NamedThread::spawn("peer", None, serve).unwrap();
    let watch = PollSet::new().unwrap();
    let readable = Interest { readable: true, writable: false };
    watch.add(link.descriptor(), 0, readable).unwrap();
    let mut ready = Vec::new();
    while link.lost_reason().is_none() {
        watch.wait(Some(TIME_LIMIT), &mut ready).unwrap();
        assert!(!ready.is_empty(), "no event reports that there is room");
        link.drive_io();
    }
    mock_server.join();
}

/// DMA_WRITE requests without reply, to an unmapped address (Protocol Specification, Header).
fn dma_write_message_bytes() -> Vec<u8> {
    let (id, command, size, flags, error) = (1_u16, 12_u16, 16_u32 + 16 + 4096, 1_u32 << 4, 0_u32);
    let header = [
        &id.to_le_bytes()[..],
        &command.to_le_bytes(),
        &size.to_le_bytes(),
        &flags.to_le_bytes(),
        &error.to_le_bytes(),
        &0_u64.to_le_bytes(),
        &4096_u64.to_le_bytes(),
    ];
    [&header.concat()[..], &[0; 4096]].concat()
}

#[test]
fn server_that_never_replies_times_out_even_if_it_sends_messages() {
    let regions = RegionTable::new(4);
    let (link, _, mock_server) = connect_to_server(Span::from_ms(100), device(None), &regions);
    let clock = Clock::start();
    let talk = move |stop: &StopFlag| {
        let message = dma_write_message_bytes();
        let mut rest = &message[..];
        while !stop.is_stopped() {
            let Ok(sent) = mock_server.connection.send(rest) else { return };
            rest = if sent == rest.len() { &message } else { &rest[sent..] };
        }
    };
    let talker = NamedThread::spawn("talks", None, talk).unwrap();
    let begun: Instant = clock.now();
    let reply = link.read(region_index::BAR0, 0, 4);
    assert!(reply.unwrap_err().text.contains("no response within"));
    assert!(clock.now().since(begun) < Span::from_secs(10));
    drop(link);
    talker.stop();
}

#[test]
fn doorbells_that_cannot_be_mapped_are_sent() {
    let regions = RegionTable::new(4);
    let file = regions.allocate_shared(8192).unwrap();
    let file = Arc::new(regions.descriptor(file.id()).unwrap());
    for (area, is_mapped) in [
        (SparseMmapArea { offset: 0x1000, size: 0x1000 }, true),
        (SparseMmapArea { offset: 0x1000, size: 0x800 }, false),
    ] {
        let device = device(Some((area, Arc::clone(&file))));
        let (_link, offer, _peer) = connect_to_server(TIME_LIMIT, device, &regions);
        assert_eq!(offer.doorbells.is_some(), is_mapped, "{area:?}");
    }
}
