//! Fuzz target: passes arbitrary bytes to every parser and checks invariants.
//!
//! Called by a fuzzer, and by the test in this file with a seeded corpus. It must never panic.

use core::fmt;

use crate::command::Command;
use crate::completion::Completion;
use crate::feature::identity::HostMetadata;
use crate::identify::list::EnduranceGroupList;
use crate::identify::namespace::GuardFormat;
use crate::identify::{
    CommandSets, ControllerList, NamespaceIdentifier, NamespaceList, namespace_identifiers,
};
use crate::io::copy::{CopyFormat, parse_copy_sources};
use crate::io::{LbaRange, dataset, reservation};
use crate::layout::{Field, Layout, LayoutVisitor, TruncatedError, decode};
use crate::log::event::EventResult;
use crate::log::firmware::TelemetryHost;
use crate::log::self_test::{SelfTestOutcome, SelfTestPage};
use crate::log::{ana, discovery, error_information, lba, persistent_events};
use crate::protection_information::ProtectionInfoFormat;
use crate::sgl::Descriptor;
use crate::status::Status;
use crate::typed::{CommandVisitor, TypedCommand};
use crate::{directive, nbd, nqn, prp, tcp};

/// Passes `bytes` to every parser.
///
/// # Panics
///
/// If an invariant is violated, which is a bug of this crate.
pub fn fuzz_all_parsers(bytes: &[u8]) {
    crate::visit_layouts(&mut StructureVisitor(bytes));
    if let Some(bytes) = bytes.first_chunk::<64>() {
        let command = Command::from_bytes(bytes);
        assert_eq!(&command.to_bytes(), bytes);
        crate::visit_commands(&mut CommandFuzzVisitor(command));
        check_command_dwords(&command);
    }
    fuzz_lists(bytes);
    fuzz_codes(bytes);
    fuzz_protection_information(bytes);
    fuzz_prps(bytes);
    fuzz_nbd(bytes);
    fuzz_fabrics(bytes);
}

struct StructureVisitor<'a>(&'a [u8]);

impl LayoutVisitor for StructureVisitor<'_> {
    fn visit<T: Layout + PartialEq + fmt::Debug>(&mut self) {
        check_structure(T::NAME, T::BYTES, T::fields(), self.0, |bytes| {
            Ok(T::parse(bytes)?.to_bytes())
        });
    }
}

struct CommandFuzzVisitor(Command);

impl CommandVisitor for CommandFuzzVisitor {
    fn visit<T: TypedCommand>(&mut self) {
        let command = T::with_opcode_of(self.0);
        check_typed_command(T::NAME, T::fields(), command, |command| {
            Ok(T::parse(&command)?.to_command())
        });
    }
}

fn check_structure(
    name: &str,
    length: usize,
    fields: &[Field],
    bytes: &[u8],
    reread: fn(&[u8]) -> Result<Vec<u8>, TruncatedError>,
) {
    let Ok(again) = reread(bytes) else {
        assert!(bytes.len() < length, "{name} refuses enough bytes");
        return;
    };
    assert_eq!(again, bytes[..length], "{name} keeps every bit");
    assert_eq!(decode(&again, fields).len(), fields.len(), "{name} is shown");
}

fn check_typed_command(
    name: &str,
    fields: &[Field],
    command: Command,
    reread: fn(Command) -> Result<Command, Status>,
) {
    let once = reread(command).expect("the opcode fits");
    assert_eq!(reread(once), Ok(once), "{name} is read again");
    assert_eq!(once.opcode(), command.opcode(), "{name} keeps its opcode");
    assert_eq!(decode(&once.to_bytes(), fields).len(), fields.len(), "{name} is shown");
}

/// Parses names, discovery pages, and the first bytes as each NVMe/TCP PDU type. The last byte
/// selects the PDU framing.
fn fuzz_fabrics(bytes: &[u8]) {
    if let Some(Ok(name)) = bytes.first_chunk().map(nqn::parse_nqn_field) {
        assert_eq!(nqn::check_nqn(name), Ok(()));
    }
    assert!(discovery::discovery_entries(bytes).count() <= bytes.len() / 1024);
    assert!(discovery::discovery_entries(bytes).all(|entry| entry.tcp_port() != Some(0)));
    let how = bytes.last().copied().unwrap_or(0);
    let (header_digest, data_digest) = (how & 0x80 != 0, how & 0x40 != 0);
    let framing = tcp::PduFraming { header_digest, data_digest, alignment: how & 0x1f };
    if let Ok(pdu) = tcp::CapsuleCmd::parse(bytes)
        && let Ok(data) = pdu.check(framing, 8192)
    {
        let rest = pdu.plen() - u32::from(data.offset) - data.len_bytes;
        assert!(data.len_bytes <= 8192 && rest <= 76);
        assert_eq!(tcp::CapsuleCmd::new(framing, &pdu.command(), 0).command(), pdu.command());
    }
    if let Ok(pdu) = tcp::H2CData::parse(bytes)
        && pdu.check_header(framing).is_ok()
    {
        assert!(u64::from(pdu.plen()) >= u64::from(pdu.datal()) + 24 && pdu.pdo() >= 24);
    }
    if let Ok(pdu) = tcp::C2HData::parse(bytes)
        && pdu.check_header(framing).is_ok()
    {
        assert!(!pdu.success() || pdu.last());
    }
    if let Ok(pdu) = tcp::TermReq::parse(bytes) {
        assert_eq!(tcp::FatalStatus::from_code(pdu.fes()), pdu.fatal_error().status);
        assert!(!pdu.is_valid() || pdu.plen() <= 152);
    }
}

fn check_command_dwords(command: &Command) {
    let again = Command::new(command.opcode())
        .with_fuse(command.fuse())
        .with_cid(command.cid())
        .with_nsid(command.nsid());
    assert_eq!(again.nsid(), command.nsid());
    let blocks = LbaRange::from_command(command);
    assert!((1..=65_536).contains(&blocks.count));
    assert!(blocks.end_lba().is_none_or(|end| end > blocks.slba));

    let described = command.sgl1();
    let meaning = described.decode();
    assert_eq!(meaning.to_descriptor().decode(), meaning);
    assert_eq!(Descriptor::from_bytes(&described.to_bytes()), described);

    let [low, high] = [command.cdw10(), command.cdw11()];
    let completion = Completion([low, high, command.cdw12(), command.cdw13()]);
    assert_eq!(Completion::from_bytes(&completion.to_bytes()), completion);
    let status = completion.status();
    assert!(!status.to_string().is_empty() && !status.name().is_empty());
    assert!(!(status.is_success() && status.is_retryable()));

    let event = EventResult(low & 0x00ff_ff07);
    assert_eq!(EventResult::new(event.event(), event.lid()), event);
}

fn fuzz_lists(bytes: &[u8]) {
    let length = bytes.len();
    assert!(
        ana::parse_ana_groups(bytes).map(|(_, nsids)| nsids.count()).sum::<usize>() <= length / 4
    );
    assert!(error_information::error_entries(bytes).count() <= length / 64);
    assert!(
        persistent_events::parse_persistent_events(bytes)
            .map(|(_, body)| body.len())
            .sum::<usize>()
            <= length
    );
    assert!(lba::lba_status_descriptors(bytes).count() <= length / 16);
    assert_eq!(dataset::parse_dataset_ranges(bytes).count(), length / 16);
    for range in dataset::parse_dataset_ranges(bytes) {
        assert!(range.end_lba().is_none_or(|end| end >= range.slba()));
    }
    assert!(reservation::report_registrants(bytes).count() <= length / 24);
    assert!(reservation::report_registrants_extended(bytes).count() <= length / 64);
    assert!(directive::reclaim_unit_handles(bytes).count() <= length / 32);
    if let Ok(list) = NamespaceList::parse(bytes) {
        assert_eq!(NamespaceList::new(list.iter()).iter().count(), list.iter().count());
    }
    if let Ok(list) = ControllerList::parse(bytes) {
        assert!(ControllerList::new(list.iter()).iter().eq(list.iter()));
    }
    if let Ok(sets) = CommandSets::parse(bytes) {
        assert!(sets.iter().all(|vector| vector.0 != 0));
    }
    if let Ok(list) = EnduranceGroupList::parse(bytes) {
        assert!(list.iter().count() <= usize::from(list.count()));
    }
    if let Ok(page) = HostMetadata::parse(bytes) {
        let reported: usize = page.iter().map(|(_, _, value)| 4 + value.len()).sum();
        assert!(reported <= 4094);
    }
    if let Ok(page) = SelfTestPage::parse(bytes) {
        assert!(page.results().all(|result| result.outcome() != SelfTestOutcome::Unused));
    }
    if let Ok(page) = TelemetryHost::parse(bytes) {
        assert!((1..=4).all(|area| page.len_bytes_through_area(area) % 512 == 0
            && page.len_bytes_through_area(area) > 0));
    }
    let named: Vec<NamespaceIdentifier> = namespace_identifiers(bytes).collect();
    let mut emitted = Vec::new();
    named.iter().for_each(|identifier| identifier.emit(&mut emitted));
    assert!(namespace_identifiers(&emitted).eq(named) && emitted.len() <= length);
}

fn fuzz_codes(bytes: &[u8]) {
    for &format in CopyFormat::ALL {
        let read: Vec<_> = parse_copy_sources(format, bytes).collect();
        let mut emitted = Vec::new();
        read.iter().for_each(|source| source.emit(format, &mut emitted));
        assert!(parse_copy_sources(format, &emitted).eq(read), "{format:?} is read again");
    }
}

fn fuzz_protection_information(bytes: &[u8]) {
    let [kind, storage_tag_bits, tuple @ ..] = bytes else { return };
    let Some(format) =
        ProtectionInfoFormat::new(GuardFormat::from_code(kind % 5), *storage_tag_bits)
    else {
        return;
    };
    if let Some(parsed) = format.parse_tuple(tuple) {
        let mut emitted = vec![0; format.tuple_bytes()];
        format.store_tuple(&parsed, &mut emitted);
        assert_eq!(emitted, tuple[..emitted.len()]);
        assert_eq!(format.join_tags(format.split_tags(parsed.tags)), parsed.tags);
    }
}

fn fuzz_nbd(bytes: &[u8]) {
    if let Some(header) = bytes.first_chunk()
        && let Ok(parsed) = nbd::RequestHeader::parse(header)
    {
        assert_eq!(&parsed.to_bytes(), header);
    }
    if let Some(header) = bytes.first_chunk()
        && let Ok(parsed) = nbd::OptionHeader::parse(header)
    {
        assert_eq!(&parsed.to_bytes(), header);
    }
    let mut emitted = Vec::new();
    if let Ok(query) = nbd::option::InfoOption::parse(bytes) {
        let infos: Vec<_> = query.infos().collect();
        nbd::option::InfoOption::emit(query.name, &infos, &mut emitted);
        assert_eq!(emitted, bytes);
    }
    emitted.clear();
    if let Ok(query) = nbd::option::MetaContextOption::parse(bytes) {
        let queries: Vec<_> = query.queries().collect();
        nbd::option::MetaContextOption::emit(query.name, &queries, &mut emitted);
        assert_eq!(emitted, bytes);
    }
    let Some((kind, payload)) = bytes.split_first_chunk::<2>() else { return };
    emitted.clear();
    let kind = nbd::ChunkCode(u16::from_be_bytes(*kind));
    if let Ok(parsed) = nbd::reply::ChunkPayload::parse(kind, payload) {
        parsed.emit(&mut emitted);
        assert_eq!((parsed.kind(), &emitted[..]), (kind, payload));
    }
}

fn fuzz_prps(bytes: &[u8]) {
    let Some((head, _)) = bytes.split_first_chunk::<8>() else { return };
    let page_bytes = 4096_usize << (head[0] & 0xf);
    let offset = usize::from(u16::from_le_bytes([head[1], head[2]])) % page_bytes;
    let length = usize::from(u16::from_le_bytes([head[3], head[4]])) << (head[5] & 0xf);
    let pages = prp::page_count(offset, length, page_bytes);
    assert!(pages * page_bytes >= length && pages <= length / page_bytes + 2);
    if let prp::Prp2Use::List { entries } = prp::prp2_use(offset, length, page_bytes) {
        let capacity = prp::list_entry_capacity(0, page_bytes);
        assert_eq!(entries + 1, pages);
        assert!(prp::list_page_count(entries, page_bytes) * capacity >= entries);
    }
}

#[cfg(test)]
mod tests {
    use super::fuzz_all_parsers;

    /// A small generator (xorshift64*): the corpus is the same in every run.
    struct Seed(u64);

    impl Seed {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
        }

        fn below(&mut self, bound: usize) -> usize {
            usize::try_from(self.next() % u64::try_from(bound).unwrap()).unwrap()
        }
    }

    #[test]
    fn random_bytes_violate_no_wire_invariant() {
        let mut seed = Seed(0x7e41_0000_0000_0001);
        for length in [0, 1, 7, 8, 15, 16, 63, 64, 65, 511, 512, 4095, 4096, 4608] {
            fuzz_all_parsers(&vec![0; length]);
            fuzz_all_parsers(&vec![0xff; length]);
        }
        for _ in 0..200 {
            let mut bytes = vec![0; seed.below(4700)];
            let dense = seed.next() & 1 == 0;
            for byte in &mut bytes {
                let drawn = seed.next().to_le_bytes();
                *byte = if dense || drawn[1] < 8 { drawn[0] } else { 0 };
            }
            fuzz_all_parsers(&bytes);
        }
    }
}
