//! Checks of the ownership and the content of buffer memory.

use tenmil_base::{BlockDevice, CompletionBatch, Instant, Memory, Operation, Request, Segment};
use tenmil_dma::RegionTable;

use super::fuzz_host::tenant_byte;
use super::{BLOCKS, TenantDevice};
use crate::tcp::connection::TargetConnection;
use crate::tcp::{BufferPool, Service};

/// Buffer memory of the connections, as of the last check.
pub(super) struct InvariantChecker {
    budget: BufferPool,
    /// Number of pages of the shared data area; pages owned by connections follow them.
    data_pages: usize,
    pages: Vec<PageOwner>,
    bytes: Vec<u8>,
}

/// Owner of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageOwner {
    None,
    /// A connection that may store anything in the page.
    Any,
    /// A connection of an I/O queue of this tenant.
    Tenant(u8),
}

/// Content of free memory.
const CANARY: u8 = 0xc7;
const PAGE: usize = 4096;
/// Bytes of a device read at a time.
const CHUNK: usize = 32 << 10;

impl InvariantChecker {
    pub(super) fn new(service: &Service) -> Self {
        let budget = service.buffer_pool().clone();
        let (data_pages, own_pages) = budget.data_and_own_page_counts();
        // Discards the record of earlier allocations; recording starts here.
        budget.take_allocated_blocks();
        let count = data_pages + own_pages;
        let mut watch = Self {
            budget,
            data_pages,
            pages: vec![PageOwner::None; count],
            bytes: vec![0; count * PAGE],
        };
        (0..count).for_each(|page| watch.fill_page_with_canary(page));
        watch
    }

    fn fill_page_with_canary(&mut self, page: usize) {
        let place = self.budget.pool_segment().slice(lba_count(page * PAGE), lba_count(PAGE));
        let filled = place.map(|place| self.budget.regions().fill(place, CANARY));
        assert_eq!(filled, Some(Ok(())), "it is the budget's");
    }

    /// Checks all memory, after an iteration of one connection.
    pub(super) fn check_buffer_ownership(&mut self, guests: &[TargetConnection]) {
        let mut owners = vec![PageOwner::None; self.pages.len()];
        for guest in guests {
            let owner = tenant_of_connection(guest).map_or(PageOwner::Any, PageOwner::Tenant);
            guest.for_each_block(&mut |pages| {
                for page in pages {
                    let place = &mut owners[page as usize];
                    assert_eq!(*place, PageOwner::None, "page {page} is had twice");
                    *place = owner;
                }
            });
        }
        // Pages allocated and released since the last check had an owner in between.
        let mut is_used = vec![false; self.pages.len()];
        for pages in self.budget.take_allocated_blocks() {
            pages.for_each(|page| is_used[page as usize] = true);
        }
        let whole = self.budget.pool_segment();
        let all = Segment { len_bytes: lba_count(self.bytes.len()), ..whole };
        self.budget.regions().load(all, &mut self.bytes).expect("it is the budget's");
        for (page, bytes) in self.bytes.chunks_exact(PAGE).enumerate() {
            if bytes == [CANARY; PAGE] {
                continue;
            }
            let (before, after) = (self.pages[page], owners[page]);
            let allowed = match (before, after) {
                (PageOwner::None, PageOwner::None) if !is_used[page] => None,
                (_, PageOwner::Tenant(tenant)) if page < self.data_pages => {
                    Some(tenant_byte(tenant))
                }
                _ => continue,
            };
            let is_right = |byte: &u8| {
                *byte == CANARY || allowed.is_some_and(|stamp| *byte == stamp || *byte == 0)
            };
            let wrong = bytes.iter().position(|byte| !is_right(byte));
            if let Some(at) = wrong {
                panic!("page {page} of {after:?}: {:02x} at {at}", bytes[at]);
            }
        }
        for page in 0..owners.len() {
            let was_used = is_used[page] || self.pages[page] != PageOwner::None;
            if was_used && owners[page] == PageOwner::None {
                self.fill_page_with_canary(page);
            }
        }
        self.pages = owners;
    }
}

/// Checks the data on the devices of the tenants.
pub(super) fn check_device_contents(media: &[TenantDevice], regions: &RegionTable) {
    let place = regions.allocate_region(CHUNK).expect("there is memory");
    let segment = Segment { len_bytes: lba_count(CHUNK), ..place.segment() };
    for (tenant, medium) in (0..).zip(media) {
        let mut channel = medium.ram.channel().expect("it is memory");
        let blocks = lba_count(CHUNK / 512);
        for lba in (0..BLOCKS).step_by(CHUNK / 512) {
            let request = Request {
                operation: Operation::Read,
                segment_count: 1,
                lba,
                blocks,
                ..Request::PLACEHOLDER
            };
            let mut answers = CompletionBatch::with_capacity(1);
            channel.submit(Instant::default(), &[request], &[segment]);
            channel.poll(Instant::default(), &mut answers);
            let mut bytes = vec![0; CHUNK];
            regions.load(segment, &mut bytes).expect("it is there");
            let is_right = |byte: &u8| *byte == 0 || *byte == tenant_byte(tenant);
            let wrong = bytes.iter().find(|byte| !is_right(byte));
            assert_eq!(wrong, None, "the medium of tenant {tenant} holds what is not its own");
        }
    }
}

/// Tenant of a connection, if it belongs to an I/O queue.
fn tenant_of_connection(guest: &TargetConnection) -> Option<u8> {
    let host = guest.host_of_io_queue()?;
    host.as_bytes().last().map(|digit| digit - b'0')
}

fn lba_count(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}
