//! Function symbols of an ELF file, for names on a stack.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Symbols of a program or library.
pub(super) struct SymbolTable {
    /// Loaded segments: offset and length in the file, address they are linked at.
    segments: Vec<(u64, u64, u64)>,
    /// Functions by address: address, length, offset of the name.
    functions: Vec<(u64, u64, u32)>,
    names: Vec<u8>,
}

/// Largest section that is read.
const SECTION_BYTES_MAX: u64 = 512 << 20;
const PT_LOAD: u32 = 1;
const SHT_SYMTAB: u32 = 2;
const SHT_DYNSYM: u32 = 11;
const STT_FUNC: u8 = 2;
const SYMBOL_BYTES: usize = 24;

impl SymbolTable {
    /// Reads the symbols of a 64-bit little-endian ELF file; the dynamic ones if it is stripped.
    pub(super) fn read(path: &str) -> Option<Self> {
        let file = File::open(path).ok()?;
        let header = read_part(&file, 0, 64)?;
        // ELFCLASS64, ELFDATA2LSB.
        if header.get(..6)? != b"\x7fELF\x02\x01" {
            return None;
        }
        let entries = |offset_at, count_at: usize, entry_bytes: usize| -> Option<Vec<Vec<u8>>> {
            let count = usize::from(u16_at(&header, count_at)?);
            let table =
                read_part(&file, u64_at(&header, offset_at)?, (count * entry_bytes) as u64)?;
            Some(table.chunks_exact(entry_bytes).map(<[u8]>::to_vec).collect())
        };
        let (programs, sections) = (entries(32, 56, 56)?, entries(40, 60, 64)?);
        let segment = |entry: &Vec<u8>| {
            (u32_at(entry, 0)? == PT_LOAD).then_some((
                u64_at(entry, 8)?,
                u64_at(entry, 32)?,
                u64_at(entry, 16)?,
            ))
        };
        let segments = programs.iter().filter_map(segment).collect();
        let of_type = |wanted| sections.iter().find(|entry| u32_at(entry, 4) == Some(wanted));
        let symbols = of_type(SHT_SYMTAB).or_else(|| of_type(SHT_DYNSYM))?;
        let strings = sections.get(u32_at(symbols, 40)? as usize)?;
        let content = |entry: &[u8]| read_part(&file, u64_at(entry, 24)?, u64_at(entry, 32)?);
        let (symbols, names) = (content(symbols)?, content(strings)?);
        let function = |symbol: &[u8]| {
            let is_defined = u16_at(symbol, 6)? != 0 && symbol[4] & 0xf == STT_FUNC;
            is_defined.then_some((u64_at(symbol, 8)?, u64_at(symbol, 16)?, u32_at(symbol, 0)?))
        };
        let mut functions: Vec<_> =
            symbols.chunks_exact(SYMBOL_BYTES).filter_map(function).collect();
        functions.sort_unstable();
        Some(Self { segments, functions, names })
    }

    /// Address at which the byte at this offset of the file is linked.
    pub(super) fn linked_address(&self, offset: u64) -> u64 {
        let mut segments = self.segments.iter();
        let found = segments.find(|(at, len, _)| (*at..at.saturating_add(*len)).contains(&offset));
        found.map_or(offset, |(at, _, address)| offset - at + address)
    }

    /// Name of the function that contains this address.
    pub(super) fn function_at(&self, address: u64) -> Option<String> {
        let after = self.functions.partition_point(|(start, _, _)| *start <= address);
        let (start, len, name) = *self.functions.get(after.checked_sub(1)?)?;
        if address >= start.saturating_add(len) {
            return None;
        }
        let name = self.names.get(name as usize..)?.split(|byte| *byte == 0).next()?;
        Some(readable_name(std::str::from_utf8(name).ok()?))
    }
}

fn read_part(file: &File, offset: u64, len: u64) -> Option<Vec<u8>> {
    let len = usize::try_from(len).ok().filter(|_| len <= SECTION_BYTES_MAX)?;
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, offset).ok()?;
    Some(bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Path of a mangled Rust name, of both manglings; without type arguments in the newer one. Other names stay.
fn readable_name(name: &str) -> String {
    let parts = match (name.strip_prefix("_ZN"), name.strip_prefix("_R")) {
        (Some(rest), _) => path_parts(rest, false),
        (_, Some(rest)) => path_parts(rest, true),
        _ => return name.to_owned(),
    };
    let is_hash = |part: &&str| part.len() == 17 && part.starts_with('h');
    let shown: Vec<String> = match parts.split_last() {
        Some((last, path)) if is_hash(last) => path.iter().map(|part| unescape(part)).collect(),
        _ => parts.iter().map(|part| unescape(part)).collect(),
    };
    if shown.is_empty() { name.to_owned() } else { shown.join("::") }
}

/// Identifiers with their lengths before them. In the newer mangling (RFC 2603), disambiguators `s…_` and
/// back references `B…_` stand between them.
fn path_parts(mut rest: &str, is_newer: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    while let Some(first) = rest.chars().next() {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        if digits > 0 {
            let len: usize = rest[..digits].parse().unwrap_or(usize::MAX);
            let after = &rest[digits..];
            let after = if is_newer { after.strip_prefix('_').unwrap_or(after) } else { after };
            let (Some(part), Some(next)) = (after.get(..len), after.get(len..)) else { break };
            if !part.is_empty() {
                parts.push(part);
            }
            rest = next;
        } else if is_newer && matches!(first, 's' | 'B') && rest.contains('_') {
            rest = rest.split_once('_').map_or("", |(_, next)| next);
        } else if is_newer {
            rest = &rest[first.len_utf8()..];
        } else {
            break;
        }
    }
    parts
}

/// Replaces the escapes of the older mangling.
fn unescape(part: &str) -> String {
    let part = part.strip_prefix('_').filter(|rest| rest.starts_with('$')).unwrap_or(part);
    let replaced = part.replace("..", "::");
    [
        ("$LT$", "<"),
        ("$GT$", ">"),
        ("$RF$", "&"),
        ("$BP$", "*"),
        ("$C$", ","),
        ("$LP$", "("),
        ("$RP$", ")"),
        ("$u20$", " "),
        ("$u27$", "'"),
        ("$u5b$", "["),
        ("$u5d$", "]"),
        ("$u7b$", "{"),
        ("$u7d$", "}"),
    ]
    .iter()
    .fold(replaced, |text, (escape, plain)| text.replace(escape, plain))
}

#[cfg(test)]
mod tests {
    use super::{SymbolTable, readable_name};

    #[test]
    fn mangled_names_become_paths() {
        let older = "_ZN14tenmil_reactor7reactor7Reactor11run_threads17h0123456789abcdefE";
        assert_eq!(readable_name(older), "tenmil_reactor::reactor::Reactor::run_threads");
        let trait_method = "_ZN54_$LT$a..B$u20$as$u20$a..Poller$GT$4poll17h0123456789abcdefE";
        // The length of the first part is not the one of this text: nothing is cut out of bounds.
        assert!(readable_name(trait_method).len() > 3);
        let newer = "_RNvMNtCskwGfYPst2Cb_14tenmil_reactor7reactorNtB2_7Reactor11run_threads";
        assert_eq!(readable_name(newer), "tenmil_reactor::reactor::Reactor::run_threads");
        assert_eq!(readable_name("nanosleep"), "nanosleep");
    }

    #[test]
    fn functions_of_this_program_are_found() {
        let path = std::env::current_exe().unwrap();
        let Some(table) = SymbolTable::read(path.to_str().unwrap()) else {
            panic!("{}: no symbols", path.display())
        };
        let middle = table.functions[table.functions.len() / 2];
        assert!(table.function_at(middle.0).is_some_and(|name| !name.is_empty()));
        assert_eq!(table.function_at(0), None);
        assert!(SymbolTable::read("/proc/self/maps").is_none(), "not an ELF file");
    }
}
