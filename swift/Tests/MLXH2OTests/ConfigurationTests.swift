import MLXH2O
import Testing

@Test func defaults() throws { #expect(try H2OConfiguration().heavySize == 128) }
