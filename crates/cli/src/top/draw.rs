//! Rendering of the state into terminal cells. Nothing is drawn outside the terminal, whatever its
//! size.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

use super::format::escape;
use super::grid::{Cell, Column, GAP, Grid, Tone, Width, bar, clip, pad, spark, width};
use super::header::header;
use super::keys::KEYS;
use super::state::{AppState, ConnectionStage, Table};
use super::tables::{processes, table};

/// Style of the screen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Theme {
    /// Whether colors may be used. Bold, dim and reversed are not colors.
    pub(crate) is_coloured: bool,
}

/// Draws the screen.
pub(crate) fn draw(state: &AppState, theme: Theme, buffer: &mut Buffer) {
    let mut area = buffer.area;
    for (text, style) in header(state, area.width, theme) {
        line(buffer, top(&mut area), &text, style);
    }
    if area.height > 2 {
        let foot = bottom(&mut area);
        line(buffer, foot, &keys(state), theme.quiet());
    }
    match &state.stage {
        _ if state.is_help => help(buffer, area),
        ConnectionStage::Choosing(running) => {
            let title = "Choose a process with the arrows and enter.";
            line(buffer, top(&mut area), title, Style::new());
            Drawing {
                grid: processes(running),
                chosen: Some(state.chosen.process),
                has_focus: true,
            }
            .draw(buffer, area, theme);
        }
        ConnectionStage::Looking => {
            let text = "This waits for a tenmil process to start; q quits, l lists those that run.";
            line(buffer, top(&mut area), text, Style::new());
        }
        _ => body(buffer, area, state, theme),
    }
}

/// Draws the tables, and the last events below them.
fn body(buffer: &mut Buffer, mut area: Rect, state: &AppState, theme: Theme) {
    if area.height > 5 {
        let event = bottom(&mut area);
        line(buffer, event, &happened(state), theme.quiet());
    }
    if state.shown.as_ref().is_some_and(|shown| shown.sample.reactors.is_empty()) {
        line(buffer, top(&mut area), "The process runs no reactors now.", Style::new());
        return;
    }
    let grids = Table::ALL.map(|which| table(state, which));
    let wanted = grids.each_ref().map(|grid| height_of(grid));
    let focus = Table::ALL.iter().position(|which| *which == state.focus).unwrap_or(0);
    let shares = shares(area.height, wanted, focus);
    for (index, (which, grid)) in Table::ALL.into_iter().zip(grids).enumerate() {
        let place = Rect { height: shares[index].min(area.height), ..area };
        area.y += place.height;
        area.height -= place.height;
        let drawing =
            Drawing { grid, chosen: chosen(state, which), has_focus: which == state.focus };
        drawing.draw(buffer, place, theme);
    }
}

/// Lines of a table: a heading, one per row or a note that there are none, and a separator.
fn height_of(grid: &Grid<'_>) -> u16 {
    u16::try_from(grid.rows.len().max(1)).unwrap_or(u16::MAX).saturating_add(2)
}

/// Distributes the lines over the tables. If there are too few for all three, the focused table gets
/// the rest.
fn shares(height: u16, wanted: [u16; 3], focus: usize) -> [u16; 3] {
    const LEAST: u16 = 3;
    let mut shares = [0; 3];
    if height < 3 * LEAST {
        shares[focus] = height;
        return shares;
    }
    let even = height / 3;
    shares = wanted.map(|wanted| wanted.min(even));
    let mut left = height - shares.iter().sum::<u16>();
    for index in [focus, 0, 1, 2] {
        let more = (wanted[index] - shares[index]).min(left);
        shares[index] += more;
        left -= more;
    }
    shares
}

fn chosen(state: &AppState, which: Table) -> Option<usize> {
    let sample = &state.shown.as_ref()?.sample;
    match which {
        Table::Reactors => {
            let id = state.chosen_reactor()?;
            state.reactor_rows().iter().position(|at| sample.reactors[*at].id == id)
        }
        Table::Threads => {
            let id = state.chosen_thread()?;
            state.thread_rows().iter().position(|at| sample.threads[*at].id == id)
        }
        Table::Pollers => {
            let last = state.poller_rows().len().checked_sub(1)?;
            Some(state.chosen.poller.min(last))
        }
    }
}

/// Table on the screen.
struct Drawing<'a> {
    grid: Grid<'a>,
    /// Selected row.
    chosen: Option<usize>,
    has_focus: bool,
}

impl Drawing<'_> {
    fn draw(&self, buffer: &mut Buffer, mut area: Rect, theme: Theme) {
        let fitted = self.grid.fit(area.width);
        let head = top(&mut area);
        let style = theme.head(self.has_focus);
        line(buffer, head, &" ".repeat(head.width.into()), style);
        for (place, column) in column_areas(head, &fitted, self.grid.columns) {
            line(buffer, place, &pad(column.1.head, place.width, column.1.width), style);
        }
        if self.grid.rows.is_empty() {
            line(buffer, top(&mut area), "none", theme.quiet());
        }
        for index in self.visible(area.height) {
            let place = top(&mut area);
            let is_chosen = self.chosen == Some(index);
            for (place, (at, column)) in column_areas(place, &fitted, self.grid.columns) {
                let cell = self.grid.rows[index].get(at).unwrap_or(&Cell::Empty);
                let (text, style) = cell_text(cell, place.width, column.width, theme);
                line(buffer, place, &text, style);
            }
            if is_chosen {
                buffer.set_style(place, theme.chosen(self.has_focus));
            }
        }
    }

    /// The rows that fit, around the selected one.
    fn visible(&self, height: u16) -> std::ops::Range<usize> {
        let (count, room) = (self.grid.rows.len(), usize::from(height));
        let middle = self.chosen.unwrap_or(0).saturating_sub(room / 2);
        let first = middle.min(count.saturating_sub(room));
        first..count.min(first + room)
    }
}

/// Areas of the columns in a line.
fn column_areas<'a>(
    line: Rect,
    fitted: &'a [(usize, u16)],
    columns: &'static [Column],
) -> impl Iterator<Item = (Rect, (usize, &'static Column))> + 'a {
    let mut begin = line.x;
    fitted.iter().map(move |(at, width)| {
        let place = Rect { x: begin.min(line.right()), width: *width, ..line }.intersection(line);
        begin = begin.saturating_add(*width).saturating_add(GAP);
        (place, (*at, &columns[*at]))
    })
}

fn cell_text(cell: &Cell<'_>, room: u16, width: Width, theme: Theme) -> (String, Style) {
    match cell {
        Cell::Text(text, tone) => (pad(text, room, width), theme.tone(*tone)),
        Cell::Bar(percent) => (bar(*percent, room), theme.share(*percent)),
        Cell::History(minute) => (spark(&minute.pieces(room)), theme.picture()),
        Cell::Empty => (String::new(), Style::new()),
    }
}

fn happened(state: &AppState) -> String {
    match state.happened.back() {
        Some(last) => format!("last event: {}: {}", escape(&last.kind), escape(&last.text)),
        None => "no event yet".into(),
    }
}

fn keys(state: &AppState) -> String {
    if state.is_help {
        return "esc back  q quit".into();
    }
    if matches!(state.stage, ConnectionStage::Choosing(_)) {
        return "q quit  ? help  enter watch".into();
    }
    let (table, sort) = (state.focus.name(), state.sort(state.focus).name());
    format!("q quit  ? help  tab next table  s sort ({table} by {sort})  p pause  l list")
}

fn help(buffer: &mut Buffer, mut area: Rect) {
    let room = KEYS.iter().map(|(key, _)| width(key)).max().unwrap_or(0);
    for (key, does) in KEYS {
        let text = format!("{}  {does}", pad(key, room, Width::Word));
        line(buffer, top(&mut area), &text, Style::new());
    }
    let notes = [
        "",
        "busy %    part of the time in iterations (of a thread: in pollers and messages) that found work",
        "found %   part of the polls that found work",
        "stalled   awake, and no iteration has ended since the sample before",
        "too long  iterations that took longer than they may; `longest` and `in` show the longest",
    ];
    for note in notes {
        line(buffer, top(&mut area), note, Style::new());
    }
}

/// Writes a text into an area, clipped to it.
fn line(buffer: &mut Buffer, place: Rect, text: &str, style: Style) {
    let place = place.intersection(buffer.area);
    if !place.is_empty() {
        let text = clip(text, place.width);
        buffer.set_stringn(place.x, place.y, text, place.width.into(), style);
    }
}

/// Splits a line off the top of an area.
fn top(area: &mut Rect) -> Rect {
    let line = Rect { height: area.height.min(1), ..*area };
    area.y += line.height;
    area.height -= line.height;
    line
}

/// Splits a line off the bottom of an area.
fn bottom(area: &mut Rect) -> Rect {
    area.height = area.height.saturating_sub(1);
    Rect { y: area.bottom(), height: 1, ..*area }
}

impl Theme {
    pub(crate) fn share(self, percent: f64) -> Style {
        let colour = match percent {
            90.0.. => Color::Red,
            60.0.. => Color::Yellow,
            _ => Color::Green,
        };
        self.colour(colour)
    }

    pub(crate) fn alarm(self) -> Style {
        self.colour(Color::Red).add_modifier(Modifier::BOLD)
    }

    pub(crate) fn quiet(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    fn picture(self) -> Style {
        self.colour(Color::Cyan)
    }

    fn head(self, has_focus: bool) -> Style {
        let style = Style::new().add_modifier(Modifier::BOLD);
        if has_focus { style.add_modifier(Modifier::UNDERLINED) } else { style }
    }

    fn chosen(self, has_focus: bool) -> Style {
        let modifier = if has_focus { Modifier::REVERSED } else { Modifier::BOLD };
        Style::new().add_modifier(modifier)
    }

    fn tone(self, tone: Tone) -> Style {
        match tone {
            Tone::Normal => Style::new(),
            Tone::Quiet => self.quiet(),
            Tone::Share(percent) => self.share(percent.into()),
            Tone::Alarm => self.alarm(),
        }
    }

    fn colour(self, colour: Color) -> Style {
        if self.is_coloured { Style::new().fg(colour) } else { Style::new() }
    }
}

#[cfg(test)]
mod tests;
