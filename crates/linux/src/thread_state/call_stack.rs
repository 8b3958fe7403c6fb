//! Stack of a thread in a system call, read through `/proc/self/mem`.
//!
//! Programs have no frame pointers, and unwinding without them needs code of its own. Here the words of the
//! stack are searched instead: a word is a return address if it points into code, behind a call. The result
//! has every frame, and may have some that have returned already and whose words were not overwritten.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;

use super::symbol_table::SymbolTable;

/// Function on a stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFrame {
    /// Name of the function, if the file has symbols.
    pub function: Option<String>,
    /// Name of the program or library.
    pub file: String,
    /// Address within the file, as `addr2line -e FILE` expects it.
    pub address: u64,
}

/// Executable mapping.
struct CodeMapping {
    start: u64,
    end: u64,
    file_offset: u64,
    path: String,
}

/// Length of the searched part of a stack.
const STACK_BYTES: usize = 64 << 10;
/// Largest number of frames.
const FRAMES_MAX: usize = 48;
/// Longest call instruction that is recognized.
const CALL_BYTES_MAX: usize = 7;

/// Frames of a stack, innermost first. Empty if the memory or the mappings cannot be read.
pub(super) fn read_stack(stack_pointer: u64, program_counter: u64) -> Vec<CallFrame> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mappings: Vec<CodeMapping> = maps.lines().filter_map(CodeMapping::parse).collect();
    let Ok(memory) = File::open("/proc/self/mem") else { return Vec::new() };
    let mut stack = vec![0; STACK_BYTES];
    let count = read_available(&memory, &mut stack, stack_pointer);
    let words = stack[..count].as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
    let is_return = |address: &u64| {
        find_mapping(&mappings, *address).is_some() && follows_call(&memory, *address)
    };
    let returns = words.filter(is_return);
    let addresses: Vec<u64> =
        std::iter::once(program_counter).chain(returns).take(FRAMES_MAX).collect();
    let mut tables: Vec<(&str, Option<SymbolTable>)> = Vec::new();
    let mut frames = Vec::new();
    for address in addresses {
        let Some(mapping) = find_mapping(&mappings, address) else { continue };
        if !tables.iter().any(|(path, _)| *path == mapping.path) {
            tables.push((&mapping.path, SymbolTable::read(&mapping.path)));
        }
        let table = tables
            .iter()
            .find_map(|(path, table)| table.as_ref().filter(|_| *path == mapping.path));
        let in_file = address - mapping.start + mapping.file_offset;
        let linked = table.map_or(in_file, |table| table.linked_address(in_file));
        frames.push(CallFrame {
            // A call at the end of a function returns behind it.
            function: table.and_then(|table| table.function_at(linked.saturating_sub(1))),
            file: mapping.path.rsplit('/').next().unwrap_or_default().to_owned(),
            address: linked,
        });
    }
    frames
}

/// Reads the pages that are there. Returns the number of bytes.
fn read_available(memory: &File, into: &mut [u8], at: u64) -> usize {
    let mut count = 0;
    while count < into.len() {
        match memory.read_at(&mut into[count..], at + count as u64) {
            Ok(0) | Err(_) => break,
            Ok(more) => count += more,
        }
    }
    count
}

fn find_mapping(mappings: &[CodeMapping], address: u64) -> Option<&CodeMapping> {
    mappings.iter().find(|mapping| (mapping.start..mapping.end).contains(&address))
}

/// Whether the instruction before `address` is a call.
fn follows_call(memory: &File, address: u64) -> bool {
    let mut code = [0; CALL_BYTES_MAX];
    let from = address.saturating_sub(CALL_BYTES_MAX as u64);
    memory.read_exact_at(&mut code, from).is_ok() && ends_with_call(&code)
}

/// CALL rel32 (E8), or CALL r/m64 (FF /2) in its lengths.
#[cfg(target_arch = "x86_64")]
fn ends_with_call(code: &[u8; CALL_BYTES_MAX]) -> bool {
    let is_indirect = |len: usize| {
        let at = CALL_BYTES_MAX - len;
        code[at] == 0xff && code[at + 1] >> 3 & 7 == 2
    };
    code[CALL_BYTES_MAX - 5] == 0xe8 || [2, 3, 4, 6, 7].into_iter().any(is_indirect)
}

/// BL, or BLR.
#[cfg(target_arch = "aarch64")]
fn ends_with_call(code: &[u8; CALL_BYTES_MAX]) -> bool {
    let [.., a, b, c, d] = *code;
    let word = u32::from_le_bytes([a, b, c, d]);
    word & 0xfc00_0000 == 0x9400_0000 || word & 0xffff_fc1f == 0xd63f_0000
}

impl CodeMapping {
    /// Parses `START-END r-xp OFFSET DEVICE INODE PATH`. Other mappings are `None`.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let is_code = words.next()?.as_bytes().get(2) == Some(&b'x');
        let hexadecimal = |text| u64::from_str_radix(text, 16).ok();
        let file_offset = hexadecimal(words.next()?)?;
        let path = words.nth(2)?.to_owned();
        let (start, end) = (hexadecimal(start)?, hexadecimal(end)?);
        is_code.then_some(Self { start, end, file_offset, path })
    }
}

impl fmt::Display for CallFrame {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.function {
            Some(function) => out.write_str(function),
            None => write!(out, "{}+{:#x}", self.file, self.address),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CodeMapping, ends_with_call};

    #[test]
    fn only_mappings_of_code_are_parsed() {
        let line = "5581c0de1000-5581c0df0000 r-xp 00011000 fe:01 123  /usr/bin/tenmil";
        let mapping = CodeMapping::parse(line).unwrap();
        assert_eq!((mapping.start, mapping.end), (0x5581_c0de_1000, 0x5581_c0df_0000));
        assert_eq!((mapping.file_offset, mapping.path.as_str()), (0x11000, "/usr/bin/tenmil"));
        assert!(CodeMapping::parse("7ffc0000-7ffc2000 rw-p 00000000 00:00 0 [stack]").is_none());
        assert!(CodeMapping::parse("7f00-7f01 r-xp 00000000 00:00 0").is_none(), "without a file");
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn calls_are_recognized_by_their_last_bytes() {
        assert!(ends_with_call(&[0x90, 0x90, 0xe8, 1, 2, 3, 4]), "call rel32");
        assert!(ends_with_call(&[0, 0, 0, 0, 0, 0xff, 0xd0]), "call *%rax");
        assert!(ends_with_call(&[0, 0, 0, 0, 0xff, 0x50, 0x18]), "call *0x18(%rax)");
        assert!(ends_with_call(&[0, 0xff, 0x15, 1, 2, 3, 4]), "call *x(%rip)");
        assert!(!ends_with_call(&[0x90; 7]));
        assert!(!ends_with_call(&[0, 0, 0, 0, 0, 0xff, 0xe0]), "jmp *%rax");
    }
}
