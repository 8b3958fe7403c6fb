//! Batches of I/Os that differ, against a model: what one batch prepares is reused by the next.

#![expect(clippy::cast_possible_truncation, reason = "small numbers of a test")]

use std::ffi::c_void;
use std::ptr;

use tenmil_base::Random;
use tenmil_capi::*;

const BLOCK: usize = 512;
const BLOCKS: usize = 2048;
const DEPTH: usize = 32;
/// Blocks of the largest I/O.
const LONGEST: usize = 4;

/// Memory of an I/O: of the library, or registered.
const SLOT: usize = LONGEST * BLOCK;

#[test]
fn mixed_batches_read_what_was_written() {
    let mut registered = vec![0_u8; DEPTH * SLOT];
    let (mut context, mut device) = (ContextHandle { id: 0 }, DeviceHandle { id: 0 });
    let (mut queue, mut buffer) = (QueueHandle { id: 0 }, ptr::null_mut::<c_void>());
    // SAFETY: no options, and a place for the result.
    assert_eq!(unsafe { tenmil_context_create(ptr::null(), &raw mut context) }, TENMIL_OK);
    // SAFETY: a string, and a place for the result.
    assert_eq!(unsafe { tenmil_open(context, c"ram:1m".as_ptr(), 0, &raw mut device) }, TENMIL_OK);
    // SAFETY: a place for the result.
    assert_eq!(unsafe { tenmil_queue_create(device, DEPTH as u32, &raw mut queue) }, TENMIL_OK);
    let len = (DEPTH * SLOT) as u64;
    // SAFETY: a place for the result.
    assert_eq!(unsafe { tenmil_buffer_alloc(context, len, &raw mut buffer) }, TENMIL_OK);
    let own = registered.as_mut_ptr();
    // SAFETY: the vector lives until it has been unregistered.
    let code = unsafe { tenmil_memory_register(context, own.cast(), registered.len()) };
    assert_eq!(code, TENMIL_OK);

    let mut random = Random::new(4711);
    let mut model = vec![0_u8; BLOCKS * BLOCK];
    for round in 0..3000_u32 {
        let ios = draw_batch(&mut random, round, buffer.cast(), own, &mut model);
        // SAFETY: an array of that length without segments.
        let taken = unsafe { tenmil_submit(queue, ios.as_ptr(), ios.len() as u32) };
        assert_eq!(taken, ios.len() as i32);
        for io in completed(queue, &ios) {
            let (at, len) = (io.lba as usize * BLOCK, io.blocks as usize * BLOCK);
            if io.operation == TENMIL_OP_READ {
                // SAFETY: the I/O has completed, and its memory is that long.
                let found = unsafe { std::slice::from_raw_parts(io.data.cast::<u8>(), len) };
                assert_eq!(found, &model[at..at + len], "round {round}: {io:?}");
            }
        }
    }
    assert_eq!(tenmil_queue_destroy(queue), TENMIL_OK);
    assert_eq!(tenmil_close(device), TENMIL_OK);
    assert_eq!(tenmil_memory_unregister(context, own.cast()), TENMIL_OK);
    assert_eq!(tenmil_buffer_free(context, buffer), TENMIL_OK);
    assert_eq!(tenmil_context_destroy(context), TENMIL_OK);
}

/// I/Os with blocks and memory of their own. Most batches have one shape, as most programs do; writes are
/// applied to the model.
fn draw_batch(
    random: &mut Random,
    round: u32,
    buffer: *mut u8,
    registered: *mut u8,
    model: &mut [u8],
) -> Vec<Io> {
    let count = 1 + random.below(DEPTH as u64) as usize;
    let is_mixed = random.below(3) == 0;
    let (mut blocks, mut operation) = (1 + random.below(LONGEST as u64) as u32, TENMIL_OP_READ);
    let mut ios = Vec::new();
    for number in 0..count {
        if is_mixed || number == 0 {
            blocks = 1 + random.below(LONGEST as u64) as u32;
            operation =
                [TENMIL_OP_READ, TENMIL_OP_WRITE, TENMIL_OP_FLUSH][random.below(3) as usize];
        }
        let memory = if is_mixed && random.below(2) == 0 { registered } else { buffer };
        let data = memory.wrapping_add(number * SLOT);
        // Those of one batch do not overlap: they are not ordered.
        let share = BLOCKS / DEPTH;
        let lba = number * share + random.below((share - LONGEST) as u64) as usize;
        let len = blocks as usize * BLOCK;
        if operation == TENMIL_OP_WRITE {
            let byte = (round as usize + number) as u8;
            // SAFETY: memory of this test that no I/O uses.
            unsafe { data.write_bytes(byte, len) };
            model[lba * BLOCK..][..len].fill(byte);
        }
        let has_data = operation != TENMIL_OP_FLUSH;
        ios.push(Io {
            token: number as u64,
            lba: if has_data { lba as u64 } else { 0 },
            source_lba: 0,
            data: if has_data { data.cast() } else { ptr::null_mut() },
            segments: ptr::null(),
            blocks: if has_data { blocks } else { 0 },
            segment_count: 0,
            operation,
            flags: 0,
        });
    }
    ios
}

/// The I/Os in the order in which they complete, each once.
fn completed(queue: QueueHandle, ios: &[Io]) -> Vec<Io> {
    let mut found = Vec::new();
    let mut done = Completion { token: 0, result: 0, status: 0, status_class: 0 };
    while found.len() < ios.len() {
        // SAFETY: a place for one completion.
        let count = unsafe { tenmil_poll(queue, &raw mut done, 1) };
        assert!(count >= 0);
        if count == 1 {
            assert_eq!(done.status, 0, "{:?}", ios[done.token as usize]);
            found.push(ios[done.token as usize]);
        }
    }
    let mut tokens: Vec<u64> = found.iter().map(|io| io.token).collect();
    tokens.sort_unstable();
    assert!(tokens.iter().copied().eq(0..ios.len() as u64), "each once");
    found
}
