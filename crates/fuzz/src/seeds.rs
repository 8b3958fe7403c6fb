//! What the corpus is made of: inputs that come far, for the mutator to start from.
//!
//! They are written down as code, so that a change of a layout changes them; `--make-corpus` writes
//! them to `fuzz/corpus`, where every fuzzer looks.

use base::Random;
use wire::{Command, Typed, admin, io};

/// One input of the corpus.
pub(crate) struct Seed {
    /// Whose it is.
    pub(crate) target: &'static str,
    /// Its file.
    pub(crate) name: &'static str,
    pub(crate) bytes: Vec<u8>,
}

/// Every input of the corpus.
pub(crate) fn all() -> Vec<Seed> {
    let of = |target, seeds: Vec<(&'static str, Vec<u8>)>| {
        seeds.into_iter().map(move |(name, bytes)| Seed { target, name, bytes })
    };
    of("wire", wire())
        .chain(of("controller", controller()))
        .chain(of("front", front()))
        .chain(of("control", control()))
        .chain(of("block", block()))
        .chain(of("signatures", signatures()))
        .chain(of("nbd", nbd()))
        .chain(of("tcp_host", tcp_host()))
        .chain(of("tcp_controller", tcp_controller()))
        .chain(of("tcp_service", target::tcp::fuzz::seeds()))
        .chain(of("volume", volume::fuzz::seeds()))
        .chain(of("volume_stream", volume::fuzz::stream_seeds()))
        .chain(of("vfu_server", vfu::fuzz::server_seeds()))
        .chain(of("vfu_client", vfu::fuzz::client_seeds()))
        .chain(of("vhost_server", vhost::fuzz::server_seeds()))
        .chain(of("vhost_ring", vhost::fuzz::ring_seeds()))
        .collect()
}

/// Both ends of devices, a byte of what lies between before them; see `block::guard`.
fn signatures() -> Vec<(&'static str, Vec<u8>)> {
    let disk = |marks: &[(usize, &[u8])]| {
        let mut bytes = vec![0; 8 << 10];
        bytes[0] = 40;
        for (at, mark) in marks {
            bytes[1 + at..][..mark.len()].copy_from_slice(mark);
        }
        bytes
    };
    let entries = [&[1_u8; 56][..], b"b\0o\0o\0t\0"].concat();
    vec![
        (
            "gpt",
            disk(&[(512, b"EFI PART"), (584, &[2]), (592, &[4, 0, 0, 0, 128]), (1024, &entries)]),
        ),
        ("mbr", disk(&[(450, &[0x83]), (458, &[8]), (510, &[0x55, 0xaa])])),
        ("ext4", disk(&[(1080, &[0x53, 0xef]), (1120, &[0x40]), (1128, b"0123456789abcdefhome")])),
        ("lvm", disk(&[(512, b"LABELONE"), (532, &[32]), (536, b"LVM2 001")])),
        ("luks", disk(&[(0, b"LUKS\xba\xbe\0\x02"), (168, b"1-2-3")])),
        ("md", disk(&[(4096, &[0xfc, 0x4e, 0x2b, 0xa9, 1])])),
        ("swap", disk(&[(4086, b"SWAPSPACE2"), (1036, b"0123456789abcdefswap")])),
        ("fat", disk(&[(82, b"FAT32   "), (71, b"EFI"), (510, &[0x55, 0xaa])])),
    ]
}

/// Structures and lists of each length that parsers know.
fn wire() -> Vec<(&'static str, Vec<u8>)> {
    let mut random = Random::new(1);
    let mut drawn = |len: usize| (0..len).map(|_| random.draw().to_le_bytes()[0]).collect();
    let identifiers =
        [&[3, 16, 0, 0][..], &[0x5a; 16], &[1, 8, 0, 0], &[0xa5; 8], &[4, 1, 0, 0, 0]];
    let nsids: Vec<u8> = (1_u32..=1024).flat_map(u32::to_le_bytes).collect();
    let read = Command::new(io::Read::OPCODE).with_nsid(1).with_prp(0x1000, 0x2000).with_cdw12(7);
    vec![
        ("read-command", read.to_bytes().to_vec()),
        ("namespace-identifiers", identifiers.concat()),
        ("namespace-list", nsids),
        ("identify-page", drawn(4096)),
        ("log-page", drawn(512)),
        ("protection", [&[1, 16][..], &[0x77; 16]].concat()),
    ]
}

/// Admin commands, 64 bytes each, with their data behind them. CDW3 chooses what happens: from 16
/// on, the command is executed; from 7 to 15, it is one about reservations.
fn controller() -> Vec<(&'static str, Vec<u8>)> {
    let execute = |command: Command| command.with_cdw3(16).to_bytes().to_vec();
    let identify =
        |cns: u32| execute(Command::new(admin::Identify::OPCODE).with_nsid(1).with_cdw10(cns));
    let log = |lid: u32| {
        execute(Command::new(admin::GetLogPage::OPCODE).with_nsid(1).with_cdw10(0x7f << 16 | lid))
    };
    let feature =
        |opcode: u8, fid: u32| execute(Command::new(opcode).with_cdw10(fid).with_cdw11(3));
    let every = |opcode| (1..0x20).flat_map(move |fid| feature(opcode, fid)).collect::<Vec<u8>>();
    let reserve = |opcode: u8, action: u32| {
        Command::new(opcode).with_nsid(1).with_cdw3(7).with_cdw10(action).to_bytes().to_vec()
    };
    let key = vec![0x11; 64];
    vec![
        ("identify", (0..0x20).flat_map(identify).collect()),
        ("log-pages", (0..0x16).flat_map(log).collect()),
        ("get-features", every(admin::GetFeatures::OPCODE)),
        ("set-features", every(admin::SetFeatures::OPCODE)),
        (
            "reservations",
            [
                reserve(io::reservation::ReservationRegister::OPCODE, 0),
                key.clone(),
                reserve(io::reservation::ReservationAcquire::OPCODE, 1 << 8),
                key,
                reserve(io::reservation::ReservationReport::OPCODE, 0x3f),
            ]
            .concat(),
        ),
    ]
}

/// Scripts: how the world is, then steps. Each begins as a driver does.
fn front() -> Vec<(&'static str, Vec<u8>)> {
    const ENABLE: &[u8] = &[0];
    const CREATE: &[u8] = &[1, 0, 1, 1];
    const TURN: &[u8] = &[8, 63];
    // Queue, opcode, namespace and whether there are PRPs, place; then the command.
    let submit =
        |opcode: u8, command: Command| [&[2, 1, opcode, 5, 4][..], &command.to_bytes()].concat();
    let blocks = Command::new(0).with_cdw10(1).with_cdw12(7);
    let work = |mode: u8| {
        let read = submit(io::Read::OPCODE, blocks);
        let write = submit(io::Write::OPCODE, blocks);
        let flush = submit(io::Flush::OPCODE, Command::new(0));
        [&[mode], ENABLE, CREATE, &read, &write, &flush, TURN, &[7, 1, 3], &read, TURN].concat()
    };
    vec![
        ("work", work(0)),
        ("work-over-bounce-buffers", work(2)),
        ("work-of-a-host-that-answers-later", work(7)),
        ("work-of-a-medium-that-answers-later", work(8)),
        ("reset-amid-work", [&work(4)[..], &[9, 0, 0, 0, 0], ENABLE, CREATE, TURN].concat()),
        (
            "doorbells-of-any-value",
            [&[0], ENABLE, CREATE, &[5, 2, 9, 0, 0, 0, 5, 3, 1, 1, 1, 1]].concat(),
        ),
    ]
}

/// Lines of a connection: requests, and what comes back.
fn control() -> Vec<(&'static str, Vec<u8>)> {
    let requests = [
        r#"{"id":1,"method":"methods"}"#,
        r#"{"id":"two","method":"set_poll","parameters":{"mode":"always","reactor":0}}"#,
        r#"{"id":3,"method":"threads","parameters":{"name":"submit-0"}}"#,
        r#"{"id":4,"method":"events","parameters":{}}"#,
    ];
    let replies = [
        r#"{"id":1,"answer":[{"name":"methods"}]}"#,
        r#"{"id":2,"error":{"code":"absent","blame":"caller","message":"no","hint":"yes"}}"#,
        r#"{"event":{"kind":"set","at_ns":5,"text":"","about":{}}}"#,
    ];
    vec![("requests", lines(&requests)), ("replies", lines(&replies))]
}

/// How the bytes come, then what a client says: a handshake, and requests.
fn nbd() -> Vec<(&'static str, Vec<u8>)> {
    use wire::nbd::{Command, CommandFlags, OptionCode, OptionHeader, RequestHeader, option};
    let option = |option, data: &[u8]| {
        let len_bytes = u32::try_from(data.len()).unwrap_or(0);
        [&OptionHeader { option, len_bytes }.to_bytes(), data].concat()
    };
    let (mut query, mut export) = (Vec::new(), Vec::new());
    option::ContextQuery::emit("", &[option::BASE_ALLOCATION], &mut query);
    option::InfoQuery::emit("fuzz", &[wire::nbd::InfoCode::NAME], &mut export);
    let handshake = [
        vec![0, 0, 0, 3],
        option(OptionCode::LIST, &[]),
        option(OptionCode::STRUCTURED_REPLY, &[]),
        option(OptionCode::SET_META_CONTEXT, &query),
        option(OptionCode::GO, &export),
    ];
    let request = |command, cookie, len_bytes| {
        let flags = CommandFlags::NONE;
        RequestHeader { flags, command, cookie, offset: 4096, len_bytes }.to_bytes().to_vec()
    };
    let requests = [
        request(Command::READ, 1, 40_960),
        request(Command::WRITE, 2, 512),
        vec![0x5a; 512],
        request(Command::FLUSH, 3, 0),
        request(Command::TRIM, 4, 512),
        request(Command::WRITE_ZEROES, 5, 1 << 20),
        request(Command::BLOCK_STATUS, 6, 4096),
        request(Command::CACHE, 7, 512),
    ];
    let old = option(OptionCode::EXPORT_NAME, b"fuzz");
    let with = |how: u8, parts: &[&[Vec<u8>]]| {
        let parts = parts.iter().map(|part| part.concat()).collect::<Vec<_>>().concat();
        [vec![how], parts].concat()
    };
    vec![
        ("session", with(0xf0, &[&handshake, &requests, &[request(Command::DISC, 8, 0)]])),
        ("session-byte-by-byte", with(0, &[&handshake, &requests])),
        ("read-only-and-failing", with(0x33, &[&handshake, &requests])),
        ("old-style", with(0x40, &[&[vec![0, 0, 0, 1], old], &requests])),
    ]
}

/// Digests and alignment, how the stream is cut, MAXH2CDATA, an opening that is not bent; then steps.
/// Each step has an offset and a length, in words of 4, and what is done to the unit: nothing.
fn tcp_host() -> Vec<(&'static str, Vec<u8>)> {
    const NOTHING: &[u8] = &[0, 0, 0];
    let submit = |kind: u8, words: u8| [kind, 0, words].to_vec();
    let unit = |step: u8, offset: u8, words: u8| [&[step, offset, words][..], NOTHING].concat();
    let reads = [submit(1, 8), unit(3, 0, 4), unit(0x0c, 0, 4), submit(0, 0), unit(5, 0, 0)];
    let writes = [
        submit(2, 4),
        unit(5, 0, 0),
        submit(2, 0x30),
        unit(6, 0, 0x10),
        unit(6, 0x10, 0x20),
        unit(0x0d, 0, 0),
    ];
    let with = |how: u8, steps: &[Vec<u8>]| [&[how, 40, 1][..], NOTHING, &steps.concat()].concat();
    vec![
        ("reads", with(0, &reads)),
        ("reads-with-digests", with(3, &reads)),
        ("writes", with(0, &writes)),
        ("writes-aligned-with-digests", with(0x3b, &writes)),
    ]
}

/// As for the host's end, with the way that reads end in the place of MAXH2CDATA, and MAXR2T.
fn tcp_controller() -> Vec<(&'static str, Vec<u8>)> {
    const NOTHING: &[u8] = &[0, 0, 0];
    let unit = |step: u8, offset: u8, words: u8| [&[step, offset, words][..], NOTHING].concat();
    let finish = |step: u8| [step, 0, 0].to_vec();
    let reads = [unit(0, 0, 0), unit(2, 1, 0x20), finish(4), unit(2, 1, 0x20), finish(0x0c)];
    let writes = [unit(3, 0, 8), unit(1, 3, 0x20), unit(0x0d, 1, 0x20), unit(1, 3, 0x30)];
    let with =
        |how: u8, steps: &[Vec<u8>]| [&[how, 40, 2, 3][..], NOTHING, &steps.concat()].concat();
    vec![
        ("reads", with(0, &reads)),
        ("reads-with-digests", with(3, &reads)),
        ("writes", with(0, &writes)),
        ("writes-aligned-with-digests", with(0x3b, &writes)),
    ]
}

fn lines(lines: &[&str]) -> Vec<u8> {
    lines.iter().flat_map(|line| format!("{line}\n").into_bytes()).collect()
}

/// Names of devices, rules and quantities.
fn block() -> Vec<(&'static str, Vec<u8>)> {
    [
        ("stack", "stripe:[file:/a%20b?size=1m],[delay:[ram:2m]?read=1us]?chunk=64k"),
        (
            "deep",
            "delay:[fault:[split:[model:[ram:1g?block=4k]?device=p4600]?part=0&parts=4]?seed=7]",
        ),
        ("escapes", "file:/odd%3f%25%5bname%5d?x=a=b%26c&y=[z]"),
        ("rules", "error:write@0-1023x3;hang:any+100;corrupt:read,write/10;tear:write~50x1"),
        ("time", "1.5ms"),
        ("size", "64KiB"),
    ]
    .map(|(name, text)| (name, text.as_bytes().to_vec()))
    .into()
}

#[cfg(test)]
mod tests {
    use super::all;

    #[test]
    fn the_corpus_in_the_tree_is_what_is_described_here() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus");
        for seed in all() {
            let file = format!("{corpus}/{}/{}", seed.target, seed.name);
            let bytes = std::fs::read(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
            assert!(bytes == seed.bytes, "{file}: run `cargo run -p tenmil-fuzz -- --make-corpus`");
        }
    }
}
