//! One process serves a disk over vhost-user, and a front end that others have written uses it.

#[expect(dead_code, reason = "this test uses a part of it")]
#[path = "../../../serve/src/vhost_user/tests/virtio_driver.rs"]
mod virtio_driver;

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::served::ServeProcess;
use tenmil_dma::{Region, RegionTable};
use vhost_front::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight,
};
use vhost_front::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost_front::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_driver::{
    GUEST, MEMORY_BYTES, SIZE, USER, VirtioBlkDriver, flush_request, queue_addresses, read_request,
    write_request,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// A machine: its memory, and what a server has to find again.
struct FrontEndMemory {
    regions: RegionTable,
    memory: Region,
    inflight: Option<(VhostUserInflight, File)>,
}

/// A connection to a server.
struct FrontEndConnection {
    front: Frontend,
    kicks: Vec<EventFd>,
    calls: Vec<EventFd>,
}

fn serve(uri: &str, socket: &Path) -> ServeProcess {
    let listen = format!("vhost-user:{}", socket.display());
    let served = ServeProcess::start_shell_line(&format!(
        "{TENMIL} serve '{uri}' --listen '{listen}' --cores 0"
    ));
    assert_eq!(served.ready.trim(), format!("ready {listen}"));
    served
}

impl FrontEndMemory {
    fn new() -> Self {
        let regions = RegionTable::shared(1);
        let memory = regions.allocate_region(usize::try_from(MEMORY_BYTES).unwrap()).unwrap();
        Self { regions, memory, inflight: None }
    }

    fn file(&self) -> OwnedFd {
        self.regions.descriptor(self.memory.id()).unwrap()
    }

    fn driver(&self, queue: u64) -> VirtioBlkDriver<RegionTable> {
        VirtioBlkDriver::new(self.regions.clone(), self.memory.id(), queue)
    }

    /// Connects, and agrees on all that is offered; memory is shared.
    fn connect(&mut self, socket: &Path) -> FrontEndConnection {
        let mut front = Frontend::connect(socket, 64).unwrap();
        let features = front.get_features().unwrap();
        let offered = front.get_protocol_features().unwrap();
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        assert!(offered.contains(wanted), "{offered:?}");
        front.set_protocol_features(wanted).unwrap();
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        front.set_owner().unwrap();
        front.set_features(features).unwrap();
        let (asked, file) = match &self.inflight {
            Some((area, file)) => (*area, file.try_clone().unwrap()),
            None => front.get_inflight_fd(&VhostUserInflight::new(0, 0, 2, SIZE)).unwrap(),
        };
        front.set_inflight_fd(&asked, file.as_raw_fd()).unwrap();
        self.inflight = Some((asked, file));
        let file = self.file();
        let area = VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST,
            memory_size: MEMORY_BYTES,
            userspace_addr: USER,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        front.set_mem_table(&[area]).unwrap();
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        let mut connection = FrontEndConnection {
            front,
            kicks: (0..2).map(|_| event()).collect(),
            calls: (0..2).map(|_| event()).collect(),
        };
        connection.start();
        connection
    }
}

impl FrontEndConnection {
    /// Has both queues run from where they are: what they had taken is in the record.
    fn start(&mut self) {
        for queue in 0..2 {
            let [descriptors, available, used] = queue_addresses(queue as u64);
            let place = VringConfigData {
                queue_max_size: SIZE,
                queue_size: SIZE,
                flags: 0,
                desc_table_addr: descriptors,
                used_ring_addr: used,
                avail_ring_addr: available,
                log_addr: None,
            };
            self.front.set_vring_num(queue, SIZE).unwrap();
            self.front.set_vring_base(queue, 0).unwrap();
            self.front.set_vring_addr(queue, &place).unwrap();
            self.front.set_vring_call(queue, &self.calls[queue]).unwrap();
            self.front.set_vring_kick(queue, &self.kicks[queue]).unwrap();
            self.front.set_vring_enable(queue, true).unwrap();
        }
    }

    fn kick(&self) {
        self.kicks.iter().for_each(|kick| kick.write(1).unwrap());
    }
}

fn await_used(driver: &mut VirtioBlkDriver<RegionTable>) -> u16 {
    let end = Instant::now() + TIME_LIMIT;
    loop {
        if let Some((head, _)) = driver.take_used() {
            return head;
        }
        assert!(Instant::now() < end, "nothing is used");
        std::thread::yield_now();
    }
}

fn stamp(number: u64) -> [u8; 4096] {
    let mut bytes = [0; 4096];
    for (word, at) in bytes.chunks_exact_mut(8).zip(0_u64..) {
        word.copy_from_slice(&(number << 32 | at).to_le_bytes());
    }
    bytes
}

#[test]
fn foreign_front_end_negotiates_and_uses_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let disk = directory.path().join("disk");
    let served = serve(&format!("file:{}?size=16m", disk.display()), &socket);
    let mut machine = FrontEndMemory::new();
    let mut connection = machine.connect(&socket);
    let flags = VhostUserConfigFlags::empty();
    let (_, config) = connection.front.get_config(0, 60, flags, &[0; 60]).unwrap();
    assert_eq!(config[..8], (16_u64 << 11).to_le_bytes());
    let queues = connection.front.get_queue_num().unwrap();
    assert_eq!(u16::from_le_bytes([config[34], config[35]]), u16::try_from(queues).unwrap());
    assert_eq!(connection.front.get_max_mem_slots().unwrap(), 256);
    let mut drivers = [machine.driver(0), machine.driver(1)];
    for number in 0..40 {
        let driver = &mut drivers[usize::try_from(number % 2).unwrap()];
        driver.store_bytes(driver.data_offset(0), &stamp(number));
        driver.submit_request(0, write_request(number * 8, 4096));
        connection.kick();
        assert_eq!((await_used(driver), driver.request_status(0)), (0, 0));
    }
    // More memory comes and goes while the queues run.
    let file = machine.file();
    let more = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: 0x1_0000,
        userspace_addr: 0x1000,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    connection.front.add_mem_region(&more).unwrap();
    connection.front.remove_mem_region(&more).unwrap();
    assert!(connection.front.remove_mem_region(&more).is_err(), "it is gone already");
    for number in 0..40 {
        let driver = &mut drivers[usize::try_from(number % 2).unwrap()];
        driver.store_bytes(driver.data_offset(0), &[0; 4096]);
        driver.submit_request(0, read_request(number * 8, 4096));
        connection.kick();
        assert_eq!((await_used(driver), driver.request_status(0)), (0, 0));
        assert!(driver.load_bytes::<4096>(driver.data_offset(0)) == stamp(number), "{number}");
    }
    drivers[0].submit_request(0, flush_request());
    connection.kick();
    assert_eq!((await_used(&mut drivers[0]), drivers[0].request_status(0)), (0, 0));
    assert_eq!(connection.front.get_vring_base(0).unwrap(), 41);
    assert_eq!(connection.front.get_vring_base(1).unwrap(), 40);
    // It did all of this with the rights that are left.
    let report = served.rights_after_drop();
    assert_eq!(report["tcp_connect"], false);
}

/// Bytes of the disk, as configuration space has them.
fn size_bytes(connection: &mut FrontEndConnection) -> u64 {
    let flags = VhostUserConfigFlags::empty();
    let (_, config) = connection.front.get_config(0, 8, flags, &[0; 8]).unwrap();
    u64::from_le_bytes(config.try_into().unwrap()) << 9
}

#[test]
fn foreign_front_end_is_notified_of_a_grown_volume() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let pool = format!("file:{}", directory.path().join("pool").display());
    let volume = format!("volume:[{pool}]/db");
    crate::served::run(TENMIL, &["pool", "create", &format!("{pool}?size=64m")]);
    crate::served::run(TENMIL, &["volume", "create", &volume, "--size", "4m"]);
    let served = serve(&volume, &socket);
    let mut machine = FrontEndMemory::new();
    let mut connection = machine.connect(&socket);
    let (mut back, given) = UnixStream::pair().unwrap();
    connection.front.set_backend_request_fd(&given).unwrap();
    assert_eq!(size_bytes(&mut connection), 4 << 20);
    let mut driver = machine.driver(0);
    let end = 4 << 11;
    driver.store_bytes(driver.data_offset(0), &stamp(7));
    for (bytes, status) in [(4_u64 << 20, 1), (12 << 20, 0)] {
        if bytes > 4 << 20 {
            served.stdout_of_rpc_command(&format!("volume resize {volume} --size 12m"));
            back.set_read_timeout(Some(TIME_LIMIT)).unwrap();
            let mut reported = [0; 12];
            back.read_exact(&mut reported).unwrap();
            // VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, version 1, nothing behind it.
            assert_eq!(reported, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        }
        assert_eq!(size_bytes(&mut connection), bytes);
        driver.submit_request(0, write_request(end, 4096));
        connection.kick();
        assert_eq!((await_used(&mut driver), driver.request_status(0)), (0, status), "{bytes}");
    }
}

/// Killed with much in flight, three times; nothing is lost, and no request fails.
#[test]
fn restarted_server_completes_inflight_requests() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let uri = format!(
        "delay:[file:{}?size=16m]?read=5ms&write=5ms&write-p99=40ms&seed=4",
        directory.path().join("disk").display()
    );
    let mut machine = FrontEndMemory::new();
    let mut drivers = [machine.driver(0), machine.driver(1)];
    let mut numbers = 0;
    // By block: what was written there last.
    let mut blocks = vec![0; 20];
    for _ in 0..3 {
        let served = serve(&uri, &socket);
        let connection = machine.connect(&socket);
        for (at, driver) in (0_u64..).zip(&mut drivers) {
            for head in (0..30).step_by(3) {
                let block = at * 10 + u64::from(head) / 3;
                numbers += 1;
                blocks[usize::try_from(block).unwrap()] = numbers;
                driver.store_bytes(driver.data_offset(head), &stamp(numbers));
                driver.submit_request(head, write_request(block * 8, 4096));
            }
        }
        connection.kick();
        // One of each queue is answered, the others are in flight.
        for driver in &mut drivers {
            let head = await_used(driver);
            assert_eq!(driver.request_status(head), 0);
        }
        drop(served);
        let _served = serve(&uri, &socket);
        let _connection = machine.connect(&socket);
        for driver in &mut drivers {
            for _ in 0..9 {
                let head = await_used(driver);
                assert_eq!(driver.request_status(head), 0);
            }
            assert_eq!(driver.next, driver.used, "each was used once");
        }
    }
    let _served = serve(&uri, &socket);
    let connection = machine.connect(&socket);
    for (block, number) in (0_u64..).zip(&blocks) {
        let driver = &mut drivers[0];
        driver.submit_request(0, read_request(block * 8, 4096));
        connection.kick();
        assert_eq!((await_used(driver), driver.request_status(0)), (0, 0));
        assert!(
            driver.load_bytes::<4096>(driver.data_offset(0)) == stamp(*number),
            "block {block}"
        );
    }
}

/// What is open and mapped in a process.
fn open_resources(pid: u32) -> (usize, usize) {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    (files, maps.lines().filter(|line| line.contains("memfd:")).count())
}

#[test]
fn server_releases_all_resources_of_a_closed_front_end() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let served = serve("ram:16m", &socket);
    let baseline = open_resources(served.pid());
    for _ in 0..3 {
        let mut machine = FrontEndMemory::new();
        let connection = machine.connect(&socket);
        let mut driver = machine.driver(0);
        driver.submit_request(0, write_request(0, 4096));
        connection.kick();
        await_used(&mut driver);
        assert!(open_resources(served.pid()).1 > baseline.1);
        driver.submit_request(0, write_request(0, 4096));
        drop(connection);
        let end = Instant::now() + TIME_LIMIT;
        while open_resources(served.pid()) != baseline {
            assert!(Instant::now() < end, "{:?}, {baseline:?}", open_resources(served.pid()));
            std::thread::yield_now();
        }
    }
}
