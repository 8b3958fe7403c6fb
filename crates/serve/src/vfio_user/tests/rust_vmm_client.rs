//! The client of rust-vmm, which cloud-hypervisor uses.

use std::os::fd::AsRawFd;

use tenmil_base::{Memory, Segment, Span};
use tenmil_dma::RegionTable;
use tenmil_linux::EventFdVectors;
use tenmil_reactor::PollMode;
use tenmil_vfio_user::{irq_index, region_index};
use vfio_user::Client;

use super::test_client::{ADMIN, BLOCKS, ENTRIES, IOVA, MEMORY_BYTES, TestServer};

/// Virtual machine that uses the rust-vmm client.
struct RustVmmClient {
    client: Client,
    regions: RegionTable,
    memory: tenmil_dma::Region,
}

impl RustVmmClient {
    fn read_bar0_u32(&mut self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.client.region_read(region_index::BAR0, at, &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    fn write_bar0(&mut self, at: u64, bytes: &[u8]) {
        self.client.region_write(region_index::BAR0, at, bytes).unwrap();
    }

    fn memory_segment(&self, offset: u64, len_bytes: u32) -> Segment {
        Segment { region: self.memory.id(), offset, len_bytes }
    }

    fn load_memory(&self, at: u64, len_bytes: u32) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes as usize];
        self.regions.load(self.memory_segment(at, len_bytes), &mut bytes).unwrap();
        bytes
    }
}

/// `VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER`.
const EVENTS: u32 = 0x24;

#[test]
fn rust_vmm_client_finds_a_controller_and_identifies_a_namespace() {
    for poll in [PollMode::Adaptive, PollMode::Always] {
        let rig = TestServer::new(poll);
        let baseline = rig.regions.region_count();
        let client = Client::new(&rig.socket_path()).unwrap();
        let regions = RegionTable::shared(1);
        let memory = regions.allocate_region(1 << 20).unwrap();
        let mut vmm = RustVmmClient { client, regions, memory };
        let mut space = [0; 64];
        vmm.client.region_read(region_index::CONFIGURATION, 0, &mut space).unwrap();
        assert_eq!(space[9..12], [2, 8, 1]);
        let bar = vmm.client.region(region_index::BAR0).unwrap();
        assert_eq!(
            (bar.size, bar.sparse_areas.len()),
            (0x4000, usize::from(poll == PollMode::Always))
        );
        assert_eq!(vmm.client.get_irq_info(irq_index::MSIX).unwrap().count, 5);
        let file = vmm.regions.descriptor(vmm.memory.id()).unwrap();
        vmm.client.dma_map(0, IOVA, MEMORY_BYTES, file.as_raw_fd()).unwrap();
        let vectors = EventFdVectors::new(5).unwrap();
        use std::os::fd::AsFd;
        let files: Vec<_> =
            (0..5).map(|vector| vectors.descriptor(vector).unwrap().as_fd().as_raw_fd()).collect();
        vmm.client.set_irqs(irq_index::MSIX, EVENTS, 0, 5, &files).unwrap();

        let last = ENTRIES - 1;
        vmm.write_bar0(0x24, &(last << 16 | last).to_le_bytes());
        vmm.write_bar0(0x28, &(IOVA + ADMIN[0]).to_le_bytes());
        vmm.write_bar0(0x30, &(IOVA + ADMIN[1]).to_le_bytes());
        vmm.write_bar0(0x14, &(6_u32 << 16 | 4 << 20 | 1).to_le_bytes());
        while vmm.read_bar0_u32(0x1c) & 1 == 0 {}
        let mut identify = [0_u32; 16];
        (identify[0], identify[1], identify[6]) = (6, 1, u32::try_from(IOVA).unwrap() + 0x10000);
        let bytes: Vec<u8> = identify.iter().flat_map(|dword| dword.to_le_bytes()).collect();
        vmm.regions.store(vmm.memory_segment(ADMIN[0], 64), &bytes).unwrap();
        vmm.write_bar0(0x1000, &1_u32.to_le_bytes());
        assert!(vectors.wait_for_signal(0, Span::from_secs(20)).unwrap());
        assert_eq!(vmm.load_memory(ADMIN[1] + 14, 2), [1, 0], "a new entry, and it went well");
        assert_eq!(vmm.load_memory(0x10000, 8), BLOCKS.to_le_bytes(), "NSZE");

        vmm.client.reset().unwrap();
        assert_eq!(vmm.read_bar0_u32(0x1c) & 1, 0);
        vmm.client.dma_unmap(IOVA, MEMORY_BYTES).unwrap();
        assert_eq!(rig.regions.region_count(), baseline);
        vmm.client.shutdown().unwrap();
    }
}
