//! Who has which memory, and what is in it.

use base::{Answers, Instant, Medium, Memory, Operation, Request, Segment};
use dma::Regions;

use super::peer::stamp;
use super::{BLOCKS, Tenant};
use crate::tcp::guest::Guest;
use crate::tcp::{Budget, Service};

/// The memory of connections, as it was when it was looked at last.
pub(super) struct Watch {
    budget: Budget,
    /// Pages for data, and behind them connections' own.
    data_pages: usize,
    pages: Vec<Owner>,
    bytes: Vec<u8>,
}

/// Who has a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Nobody,
    /// A connection that may put anything there.
    Any,
    /// A connection for I/O, of this tenant.
    Tenant(u8),
}

/// What memory that nobody has is full of.
const CANARY: u8 = 0xc7;
const PAGE: usize = 4096;
/// Bytes of a medium that are looked at at a time.
const CHUNK: usize = 32 << 10;

impl Watch {
    pub(super) fn new(service: &Service) -> Self {
        let budget = service.budget().clone();
        let (data_pages, own_pages) = budget.areas();
        // From now on it is remembered what goes out.
        budget.went();
        let count = data_pages + own_pages;
        let mut watch = Self {
            budget,
            data_pages,
            pages: vec![Owner::Nobody; count],
            bytes: vec![0; count * PAGE],
        };
        (0..count).for_each(|page| watch.clear(page));
        watch
    }

    fn clear(&mut self, page: usize) {
        let place = self.budget.region().slice(len(page * PAGE), len(PAGE));
        let filled = place.map(|place| self.budget.regions().fill(place, CANARY));
        assert_eq!(filled, Some(Ok(())), "it is the budget's");
    }

    /// Looks at all of it, after a turn of one connection.
    pub(super) fn look(&mut self, guests: &[Guest]) {
        let mut owners = vec![Owner::Nobody; self.pages.len()];
        for guest in guests {
            let owner = tenant_of(guest).map_or(Owner::Any, Owner::Tenant);
            guest.each_block(&mut |pages| {
                for page in pages {
                    let place = &mut owners[page as usize];
                    assert_eq!(*place, Owner::Nobody, "page {page} is had twice");
                    *place = owner;
                }
            });
        }
        // What went out and is back already was somebody's in between.
        let mut is_used = vec![false; self.pages.len()];
        for pages in self.budget.went() {
            pages.for_each(|page| is_used[page as usize] = true);
        }
        let whole = self.budget.region();
        let all = Segment { len_bytes: len(self.bytes.len()), ..whole };
        self.budget.regions().load(all, &mut self.bytes).expect("it is the budget's");
        for (page, bytes) in self.bytes.chunks_exact(PAGE).enumerate() {
            if bytes == [CANARY; PAGE] {
                continue;
            }
            let (before, after) = (self.pages[page], owners[page]);
            let allowed = match (before, after) {
                (Owner::Nobody, Owner::Nobody) if !is_used[page] => None,
                (_, Owner::Tenant(tenant)) if page < self.data_pages => Some(stamp(tenant)),
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
            let was_used = is_used[page] || self.pages[page] != Owner::Nobody;
            if was_used && owners[page] == Owner::Nobody {
                self.clear(page);
            }
        }
        self.pages = owners;
    }
}

/// Looks what tenants' media hold.
pub(super) fn look_at_media(media: &[Tenant], regions: &Regions) {
    let place = regions.allocate(CHUNK).expect("there is memory");
    let segment = Segment { len_bytes: len(CHUNK), ..place.segment() };
    for (tenant, medium) in (0..).zip(media) {
        let mut channel = medium.ram.channel().expect("it is memory");
        let blocks = len(CHUNK / 512);
        for lba in (0..BLOCKS).step_by(CHUNK / 512) {
            let request = Request {
                operation: Operation::Read,
                segment_count: 1,
                lba,
                blocks,
                ..Request::NOTHING
            };
            let mut answers = Answers::with_capacity(1);
            channel.submit(Instant::default(), &[request], &[segment]);
            channel.poll(Instant::default(), &mut answers);
            let mut bytes = vec![0; CHUNK];
            regions.load(segment, &mut bytes).expect("it is there");
            let is_right = |byte: &u8| *byte == 0 || *byte == stamp(tenant);
            let wrong = bytes.iter().find(|byte| !is_right(byte));
            assert_eq!(wrong, None, "the medium of tenant {tenant} holds what is not its own");
        }
    }
}

/// Whose I/O queue it is.
fn tenant_of(guest: &Guest) -> Option<u8> {
    let host = guest.io_host()?;
    host.as_bytes().last().map(|digit| digit - b'0')
}

fn len(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}
